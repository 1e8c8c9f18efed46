"""Words that the project has retired, each with a plainer one; ``docs/glossary.md`` has the terms that are in use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sources import ROOT

RETIRED: dict[str, str] = {
    "anew": "again",
    "blows had fallen": "say what happens first",
    "came about": "was made, happened",
    "come about": "be made, happen",
    "comes to be": "becomes",
    "errand": "request, task or call",
    "in peace": "cleanly",
    "is had": "has, or holds",
    "last words": "the end of its log, or its error message",
    "leased": "pinned (a reader pins a version; a lease is a request's claim on a replica)",
    "let be": "left alone",
    "lets be": "leaves alone",
    "lifeline": "name the connection",
    "nobody has run": "has never run",
    "of then": "of that time, previous",
    "roster": "table, list",
    "such as have": "those that have, or name them",
    "told of": "notified of, given",
    "what cannot be meant": "invalid values",
    "whoever": "name who: a thread, a process, a caller",
    "whomever": "name who: a thread, a process, a caller",
}
"""Retired word or turn -> what to write instead."""

FOLDERS = ("torchrl_moe", "test", "benchmarks", "tutorials", "docs")
FILES = ("README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".md", ".ipynb", ".yaml"}
HERE = Path(__file__).resolve()

# Letters end a word, underscores do not: names of tests are sentences, too.
PATTERN = re.compile(
    r"(?<![a-z])(" + "|".join(r"[\s_]+".join(turn.split()) for turn in RETIRED) + r")(?![a-z])", re.IGNORECASE
)


def texts() -> Iterator[tuple[str, str]]:
    """Every text of the project with its path; of a notebook its cells, not their outputs."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    for path in [*paths, *(ROOT / name for name in FILES)]:
        if path == HERE or any(part.startswith((".", "_build")) for part in path.relative_to(ROOT).parts):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        yield str(path.relative_to(ROOT)), text


def found(text: str) -> Iterator[tuple[int, str]]:
    """Line and retired turn of each place; a turn may run over the end of a line, or of a comment's line."""
    for match in PATTERN.finditer(re.sub(r"\n(\s*)# ", r"\n\1  ", text)):
        yield text.count("\n", 0, match.start()) + 1, re.sub(r"[\s_]+", " ", match[1]).lower()


def test_no_retired_word_is_in_use() -> None:
    places = [f"{path}:{line}: {turn!r}, {RETIRED[turn]}" for path, text in texts() for line, turn in found(text)]
    assert places == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It starts anew.", [(1, "anew")]),
        ("def test_it_starts_anew(): ...", [(1, "anew")]),
        ("first\nTold\nof it", [(2, "told of")]),
        ("# it is told\n# of it", [(1, "told of")]),
        ("a renewal, a rosters' list, released and WHOEVER", [(1, "whoever")]),
    ],
)
def test_a_retired_word_is_found_as_a_whole(text: str, expected: list[tuple[int, str]]) -> None:
    assert list(found(text)) == expected
