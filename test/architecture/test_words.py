"""What texts say: no word that the project has retired, and no path of the package that leads nowhere.

``docs/concepts.md`` has the terms that are in use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from support.sources import PACKAGE, ROOT

# fmt: off
RETIRED: dict[str, str] = {
    "anew": "again", "barred": "blocked: its breaker is open", "bell": "wake event",
    "blows had fallen": "say what happens first", "came about": "was made, happened", "come about": "be made, happen",
    "comes to be": "becomes", "errand": "request, task or call", "farewell": "the name of what is done at the end",
    "give way": "yield (the interpreter), or say what happens", "hand over": "send, pass",
    "hear version": "read version", "heart": "name the part", "in peace": "cleanly", "is had": "has, or holds",
    "kept words": "kept tokens", "last words": "the end of its log, or its error message",
    "leased": "pinned (a reader pins a version; a lease is a request's claim on a replica)", "let be": "left alone",
    "let go": "release, drop", "lets be": "leaves alone", "lifeline": "name the connection", "names words": "names ids",
    "nobody has run": "has never run", "of then": "of that time, previous", "own words": "message", "parcel": "payload",
    "parked": "unplaced, waiting", "roster": "table, list", "said why": "has reported",
    "such as have": "those that have, or name them", "take on": "adopt, supervise", "told of": "notified of, given",
    "what cannot be meant": "invalid values", "whoever": "name who: a thread, a process, a caller",
    "whomever": "name who: a thread, a process, a caller", "words out": "ids out",
}
# fmt: on
"""Retired word or turn -> what to write instead."""

FOLDERS = ("torchrl_moe", "test", "benchmarks", "tutorials", "docs")
FILES = ("README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".md", ".ipynb", ".yaml"}
HERE = Path(__file__).resolve()

# Letters end a word, underscores do not: names of tests are sentences, too.
PATTERN = re.compile(
    r"(?<![a-z])(" + "|".join(r"[\s_]+".join(turn.split()) for turn in RETIRED) + r")(?![a-z])", re.IGNORECASE
)

DOTTED = re.compile(rf"(?<![\w./-]){PACKAGE}(?:\.[A-Za-z_]\w*)+")
INVENTED = {f"{PACKAGE}.{path}" for path in ("a", "data.b", "data.c", "data.x", "made_up")}
INVENTED |= {f"{PACKAGE}.modules.backends.{path}" for path in ("no_such_engine", "vllm.local")}
"""Paths of the tests of tests."""


def texts() -> Iterator[tuple[str, str]]:
    """Every text of the project with its path; of a notebook its cells, not their outputs."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    for path in [*paths, *(ROOT / name for name in FILES)]:
        parts = path.relative_to(ROOT).parts
        # the site's copies of the notebooks are made when it is built
        if path == HERE or parts[:2] == ("docs", "notebooks") or any(p.startswith((".", "_build")) for p in parts):
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
        ("def test_it_starts_anew(): ...", [(1, "anew")]),
        ("first\nTold\nof it", [(2, "told of")]),
        ("# it is told\n# of it", [(1, "told of")]),
        ("a renewal, a rosters' list, released and WHOEVER", [(1, "whoever")]),
    ],
)
def test_a_retired_word_is_found_as_a_whole(text: str, expected: list[tuple[int, str]]) -> None:
    assert list(found(text)) == expected


def leads_somewhere(path: str) -> bool:
    """Whether there is such a file, and such a name in it."""
    parts, names = path.split("."), []
    # files of this tree: an editable install would find those of another
    while not any((ROOT.joinpath(*parts[:-1]) / name).exists() for name in (f"{parts[-1]}.py", f"{parts[-1]}")):
        names.insert(0, parts.pop())
    value: object = import_module(".".join(parts))
    for name in names:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def test_every_dotted_path_leads_somewhere() -> None:
    found = {path: where for where, text in texts() for path in DOTTED.findall(text)}
    assert {path: found[path] for path in found.keys() - INVENTED if not leads_somewhere(path)} == {}


def test_a_path_that_leads_nowhere_is_found() -> None:
    assert leads_somewhere(f"{PACKAGE}.data") and leads_somewhere(f"{PACKAGE}.data.RoutedExperts")
    for path in ("data.RoutedExperts.nothing", "data.nothing", "nothing.at.all"):
        assert not leads_somewhere(f"{PACKAGE}.{path}")
