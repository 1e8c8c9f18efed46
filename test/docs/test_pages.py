"""The documentation: its tables of contents, code, links, quotes, diagrams and generated parts, as they are stored.

Its blocks are run by ``test_blocks.py``; the site is built by `make docs` and opened by `make docs-check`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest

from benchmarks import page as benchmarks_page
from benchmarks.report import Record, Row, read_records
from support import compatibility_page
from support.sources import ROOT, package_sources, script
from torchrl_moe.cli.command import Command
from torchrl_moe.cli.main import COMMANDS

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "reference").glob("*.md"))]
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)
INTERNAL = {"torchrl_moe.weight_update.transports"}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]*)(?:#([^)\s]+))?(?=\))")
LOOP = ROOT / "docs" / "loop.md"
DIAGRAMS = sorted((DOCS / "figures").glob("*.svg"))
COLORS = re.compile(r"(?:fill|stroke):([^;\"]+)")
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
EXAMPLES = {"collector.method", "data.jsonl", "report.py", "model.generate", "loss.mean"}
"""For any, in a message; files; transformers' mixin; of what a loss returns."""


def entries(page: Path) -> list[str]:
    """The pages in a page's tables of contents, relative to ``docs/``."""
    lines = [line for block in TOCTREE.findall(page.read_text()) for line in block.splitlines()]
    named = [re.sub(r".*<(.*)>", r"\1", line) for line in lines if line and not line.startswith(":")]
    return [str((page.parent / name).relative_to(DOCS)) for name in named]


def test_every_page_is_in_one_table_of_contents() -> None:
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts and "notebooks" not in page.parts]
    listed = [name for page in pages for name in entries(page) if "*" not in name]
    assert sorted([*listed, "index"]) == sorted(str(page.relative_to(DOCS).with_suffix("")) for page in pages)


def test_every_room_that_exports_names_has_an_api_page() -> None:
    pages = [page.read_text() for page in DOCS.glob("reference/*.md")]
    shown = {name for page in pages for name in re.findall(r"automodule:: (\S+)", page)}
    faces = [source for source in package_sources() if source.path.stem == "__init__" and "attach(" in source.text]
    rooms = {source.name.removesuffix(".__init__") for source in faces}
    assert rooms - shown - INTERNAL == set()


def test_the_compatibility_page_is_what_the_tests_hold() -> None:
    text = compatibility_page.PAGE.read_text(encoding="utf-8")
    assert text == compatibility_page.written(text), compatibility_page.HOW
    assert {*compatibility_page.SHOWN.findall(text)} == {"versions", "releases", "counts", "families"}


def test_the_benchmarks_page_lists_every_benchmark() -> None:
    text = benchmarks_page.PAGE.read_text(encoding="utf-8")
    assert text == benchmarks_page.written(text, {}), "PYTHONPATH=. python -m benchmarks.page writes it"
    assert {*benchmarks_page.recorded(text)} <= {*benchmarks_page.names()}


@pytest.fixture
def record() -> Record:
    rows = [Row(claim="a | b", value="0.9", target="<= 1", met=True)]
    rows.append(Row(claim="c", value="2", target="<= 1", met=False))
    return Record(measured="2 cores; 2026-01-01; torch 2", rows=[*rows, Row(claim="d", value="3")])


def test_a_record_is_shown_with_machine_and_date_and_stays_when_others_come(record: Record) -> None:
    page = "# Benchmarks\n\n<!-- list -->\n\nold\n\n<!-- end of list -->\n"
    once = benchmarks_page.written(page, {"startup": record})
    section = once[once.index("<!-- record of startup -->") :]
    assert section == (
        "<!-- record of startup -->\n\n## startup\n\n"
        f"{benchmarks_page.summary('startup')}\n\n2 cores; 2026-01-01; torch 2\n\n"
        "| what | measured | target | met |\n| --- | --- | --- | --- |\n"
        "| a \\| b | 0.9 | <= 1 | yes |\n| c | 2 | <= 1 | **no** |\n| d | 3 |  |  |\n\n<!-- end of record -->\n"
    )
    assert f"1 of {len(benchmarks_page.names())} have a record" in once
    assert "\nold\n" not in once
    twice = benchmarks_page.written(once, {"replay_cost": record})
    assert [*benchmarks_page.recorded(twice)] == ["replay_cost", "startup"]
    assert twice.endswith(section)
    assert benchmarks_page.written(twice, {}) == twice


def test_records_without_machine_and_date_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import report

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    report.finish("startup", [Row(claim="a", value="1")])
    (tmp_path / "scale.json").write_text('[{"claim": "a", "value": "1", "target": "", "met": null}]')
    (found,) = read_records(tmp_path).items()
    assert found == ("startup", Record(measured=report.describe_machine(), rows=[Row(claim="a", value="1")]))


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
        match node:
            case ast.Name(id=name):
                (read if isinstance(node.ctx, ast.Load) else bound).add(name)
            case ast.Import() | ast.ImportFrom():
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
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


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_command_line_page_shows_each_command_with_options_that_exist(command: Command) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"\n## {command.name}\n" in page
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    lines = re.findall(rf"torchrl[-_]moe(?:\.cli)? {command.name}\b[^\n`#]*", page)
    shown = {option for line in lines for option in re.findall(r"(?<= )--[a-z-]+", line)}
    known = {*parser.format_help().replace(",", " ").replace("]", " ").split(), "--json", "--traceback", "--help"}
    assert lines and shown <= known


def quoted(text: str) -> Iterator[list[str]]:
    """The messages of the troubleshooting page, cut where a value stands."""
    for heading in re.findall(r"^### `+(.+?)`+$", text, re.MULTILINE):
        yield [part for part in heading.split("…") if part.strip()]


def literals() -> list[str]:
    """Every string of the package; what an f-string fills in is a zero byte."""
    nodes = [node for source in package_sources() for node in ast.walk(source.tree)]
    found = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            found.append(
                "".join(
                    str(getattr(value, "value", "")) if isinstance(value, ast.Constant) else "\0"
                    for value in node.values
                )
            )
    return found


def test_every_quoted_message_is_in_the_source() -> None:
    texts = literals()
    messages = list(quoted((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")))
    assert len(messages) > 30
    # searched for, a message is found by its words
    assert [parts[0] for parts in messages if not re.match(r"\w", parts[0])] == []
    assert [parts for parts in messages if not any(all(part in text for part in parts) for text in texts)] == []
    # one that is gone would be found
    assert list(quoted("# A\n\n### `replica … left us: …`\n\ntext\n")) == [["replica ", " left us: "]]
    assert not any("left us" in text for text in texts)


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


def test_the_picture_differs_between_the_themes_in_colors_only() -> None:
    text = (ROOT / "README.md").read_text()
    found = [re.search(rf'(?:srcset|src)="(docs/figures/\w+_{theme}\.svg)"', text) for theme in ("dark", "light")]
    dark, light = (re.sub(r"#[0-9a-f]{6}", "#", (ROOT / one[1]).read_text()) for one in found if one)
    assert dark == light


# -- what prose says there is


def test_counts_are_of_what_there_is() -> None:
    """Families, conformance checks, notebooks and commands."""
    from torchrl_moe.testing.conformance import CHECKS

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    beside_an_engine, newest = re.findall(r"(\d+) families replay exactly", compatibility_page.counts())
    assert {*re.findall(r"(\d+)(?: MoE)? families", readme)} == {newest}
    assert {*re.findall(r"(\d+)(?= with the transformers)", readme)} == {beside_an_engine}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {*re.findall(r"(\d+)(?: conformance)? checks\b", pages)} == {str(len(CHECKS))}
    notebooks = len([*(ROOT / "tutorials").glob("*.ipynb")])
    assert f"the {NUMBERS[notebooks]} notebooks" in readme
    (row,) = re.findall(r"^\| \[Command line\].*$", readme, re.MULTILINE)
    assert {*re.findall(r"`(?:torchrl-moe )?(\w+)`", row)} == {command.name for command in COMMANDS}


def kinds() -> dict[str, list[type]]:
    """What pages call an object by -> its classes; a group of settings has its name."""
    from transformers import PreTrainedModel

    from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector
    from torchrl_moe.http.sessions import Session
    from torchrl_moe.modules import AsyncVLLM, LoadBalancer, RouterReplay, TransformersWrapper, vLLMWrapper
    from torchrl_moe.modules.backends.replica import Replica
    from torchrl_moe.objectives import GRPOLoss
    from torchrl_moe.trainers import GRPOConfig, MoEGRPOTrainer
    from torchrl_moe.weight_update import SyncReport, VLLMWeightSender

    config = GRPOConfig()
    settings = {field.name: type(getattr(config, field.name)) for field in dataclasses.fields(config)}
    objects: dict[str, list[type]] = {name: [kind] for name, kind in settings.items() if dataclasses.is_dataclass(kind)}
    for name, kind in {
        "actor": TransformersWrapper, "engine": AsyncVLLM, "lb": LoadBalancer, "loss": GRPOLoss, "policy": vLLMWrapper,
        "model": PreTrainedModel, "replay": RouterReplay, "replica": Replica, "report": SyncReport, "session": Session,
        "sender": VLLMWeightSender, "trainer": MoEGRPOTrainer,
    }.items():  # fmt: skip
        objects.setdefault(name, []).append(kind)
    return {**objects, "collector": [AsyncLLMCollector, LLMCollector]}


source_of = functools.cache(inspect.getsource)


def has(kind: type, name: str) -> bool:
    """Whether objects of a class of ours have an attribute."""
    ours = [one for one in kind.__mro__ if one.__module__.startswith("torchrl_moe")]
    own = re.compile(rf"\bself\.{name}\b|^    {name}: ", re.MULTILINE)
    return hasattr(kind, name) or any(own.search(source_of(one)) for one in ours)


def test_attributes_that_prose_names_exist() -> None:
    """Blocks are run; this is of `engine.generate` and `optim.lr` between them."""
    known = kinds()
    name = re.compile(rf"(?:(?<![\w./\"'-])|(?<=\.)(?=replica\.))({'|'.join(known)})\.([a-z]\w*)")
    missing = [
        f"{page.name}: {kind}.{attribute}"
        for page in PAGES
        for code in re.findall(r"`([^`\n]+)`", prose(page))
        for kind, attribute in name.findall(code)
        if f"{kind}.{attribute}" not in EXAMPLES and not any(has(one, attribute) for one in known[kind])
    ]
    assert missing == []


# -- the site: its links to sources, and what `make docs-check` reads


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("[a](../torchrl_moe/cli/services.py)", "[a](path:/../torchrl_moe/cli/services.py)"),
        ("[a](../Makefile#L3)", "[a](path:/../Makefile)"),
        ("[a](../tutorials/03_collectors.ipynb)", "[a](/notebooks/03_collectors.ipynb)"),
        ("[a](replay.md#a), [b](#c), [d](https://x.org/../y)", "[a](/replay.md#a), [b](#c), [d](https://x.org/../y)"),
    ],
)
def test_a_link_to_a_source_leads_to_the_copy_in_the_site(text: str, linked: str) -> None:
    pytest.importorskip("sphinx")
    app: Any = SimpleNamespace(env=SimpleNamespace(doc2path=lambda page: str(ROOT / "docs" / f"{page}.md")))
    content = [text]
    script(DOCS / "conf.py").link_sources(app, "trainer", content)
    assert content == [linked]


@pytest.fixture
def check() -> ModuleType:
    return script(DOCS / "check.py")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "index.html").write_text(
        "<h1 id='top'>A</h1><a href='#top'></a><a href='#gone'></a><a href='deep/b.html#here%20too'></a>"
        "<a href='https://example.org/x#y'></a><a href='mailto:a@b'></a><img src='missing.png'>"
    )
    (tmp_path / "deep" / "b.html").write_text("<p id='here too'><a href='../index.html#nowhere'>x</a>")
    return tmp_path


def test_dead_links_and_anchors_are_named_and_the_site_is_served(check: ModuleType, site: Path) -> None:
    assert [*check.dead_links(site)] == [
        "deep/b.html: ../index.html#nowhere has no such anchor",
        "index.html: #gone has no such anchor",
        "index.html: missing.png leads nowhere",
    ]
    with check.served(site) as address, urlopen(f"{address}/deep/b.html") as answer:
        assert b"here too" in answer.read()


def test_without_chromium_or_a_site_one_line_says_what_to_do(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(check, "SITE", tmp_path / "html")
    said = ["no Chromium on the PATH: apt-get install chromium", "no site in docs/_build/html: make docs"]
    for line in said:
        assert check.main() == 2
        assert capsys.readouterr().err == f"make docs-check: {line}\n"
        (tmp_path / "chromium").touch(mode=0o755)
