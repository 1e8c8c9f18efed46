"""Code in the documentation parses and imports what exists; quotes are in the source; diagrams keep to the theme."""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.sources import package_sources
from torchrl_moe.cli.command import Command
from torchrl_moe.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "reference").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]*)(?:#([^)\s]+))?(?=\))")
LOOP = ROOT / "docs" / "loop.md"
DIAGRAMS = sorted((ROOT / "docs" / "figures").glob("*.svg"))
COLORS = re.compile(r"(?:fill|stroke):([^;\"]+)")


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What the page's headings are linked by."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_parses_and_imports_names_that_exist(page: Path) -> None:
    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchrl_moe"):
                module = importlib.import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def names(block: str) -> tuple[set[str], set[str]]:
    """The names that a block binds, and those that it reads."""
    bound, read = set(), set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound, read


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_uses_names_that_its_page_or_the_page_on_loops_defines(page: Path) -> None:
    loop, *_ = blocks(LOOP)
    known = set(dir(builtins)).union(*(names(block)[0] for block in blocks(page)))
    if LOOP.name in [Path(path).name for path, _ in LINK.findall(prose(page))]:
        known |= names(loop)[0]
    assert [missing for block in blocks(page) if (missing := sorted(names(block)[1] - known))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for path, heading in LINK.findall(prose(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if heading and target.suffix == ".md":
            assert heading in anchors(target), f"{path}#{heading}"


def test_a_strategy_of_ones_own_runs_as_shown() -> None:
    block = next(block for block in blocks(ROOT / "docs" / "service.md") if "class EvaluationApart" in block)
    exec(compile(block, "service.md", "exec"), {})


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_command_line_page_shows_each_command_with_options_that_exist(command: Command) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"\n## {command.name}\n" in page
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    lines = re.findall(rf"torchrl[-_]moe(?:\.cli)? {command.name}\b[^\n`#]*", page)
    shown = {option for line in lines for option in re.findall(r"(?<= )--[a-z-]+", line)}
    assert lines
    assert shown <= {
        "--json",
        "--traceback",
        "--help",
        *parser.format_help().replace(",", " ").replace("]", " ").split(),
    }


def quoted(text: str) -> Iterator[list[str]]:
    """The messages of the troubleshooting page, cut where a value stands."""
    for heading in re.findall(r"^### `+(.+?)`+$", text, re.MULTILINE):
        yield [part for part in heading.split("…") if part.strip()]


def literals() -> list[str]:
    """Every string of the package; what an f-string fills in is a zero byte."""
    found = []
    for source in package_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (value.value if isinstance(value, ast.Constant) else "\0" for value in node.values)
                found.append("".join(str(part) for part in parts))
    return found


def test_every_quoted_message_is_in_the_source() -> None:
    texts = literals()
    messages = list(quoted((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")))
    assert len(messages) > 30
    # searched for, a message is found by its words
    assert [parts[0] for parts in messages if not re.match(r"\w", parts[0])] == []
    assert [parts for parts in messages if not any(all(part in text for part in parts) for text in texts)] == []


def test_a_message_that_is_gone_would_be_found() -> None:
    assert list(quoted("# A\n\n### `replica … left us: …`\n\ntext\n")) == [["replica ", " left us: "]]
    assert not any("left us" in text for text in literals())


def test_the_glossary_has_each_term_once() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    body = re.search(r"```\{glossary\}\n(.*?)```", text, re.DOTALL)
    assert body is not None
    terms = [line for line in body[1].splitlines() if line and not line.startswith((" ", ":"))]
    assert [term for term, count in Counter(terms).items() if count > 1] == []
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda diagram: diagram.stem)
def test_a_diagram_scales_and_loads_nothing(diagram: Path) -> None:
    text = diagram.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.attrib["viewBox"]
    assert root.attrib["aria-label"]
    assert not re.search(r"href|url\(|<script|@import", text)
    if not diagram.stem.endswith(("_dark", "_light")):  # those are for the README, which has no theme of ours
        fixed = [color for color in COLORS.findall(text) if not re.match(r"currentColor|none|var\(--", color)]
        assert fixed == []
        assert "width:100%" in text
