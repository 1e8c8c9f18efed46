"""The documentation's pages: each is in a table of contents, each room has one, and none that is generated is stale.

The site itself is built by `make docs` and opened by `make docs-check`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import page as benchmarks_page
from benchmarks.report import Record, Row, read_records
from support import compatibility_page
from support.sources import package_sources

DOCS = Path(__file__).parents[2] / "docs"
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)
INTERNAL = {"torchrl_moe.weight_update.transports"}


def entries(page: Path) -> list[str]:
    """The pages in a page's tables of contents, relative to ``docs/``."""
    lines = [line for block in TOCTREE.findall(page.read_text()) for line in block.splitlines()]
    named = [re.sub(r".*<(.*)>", r"\1", line) for line in lines if line and not line.startswith(":")]
    return [str((page.parent / name).relative_to(DOCS)) for name in named]


def test_every_page_is_in_one_table_of_contents() -> None:
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts and "notebooks" not in page.parts]
    listed = [name for page in pages for name in entries(page) if "*" not in name]
    there = {str(page.relative_to(DOCS).with_suffix("")) for page in pages}
    assert there - {*listed} == {"index"}
    assert {*listed} - there == set()
    assert len(listed) == len({*listed})


def test_every_room_that_exports_names_has_an_api_page() -> None:
    shown = {
        name for page in DOCS.glob("reference/*.md") for name in re.findall(r"automodule:: (\S+)", page.read_text())
    }
    rooms = {
        s.name.removesuffix(".__init__") for s in package_sources() if s.path.stem == "__init__" and "attach(" in s.text
    }
    assert rooms - shown - INTERNAL == set()


def test_the_compatibility_page_is_what_the_tests_hold() -> None:
    text = compatibility_page.PAGE.read_text(encoding="utf-8")
    assert text == compatibility_page.written(text), compatibility_page.HOW
    assert {*compatibility_page.SHOWN.findall(text)} == {"versions", "releases", "counts", "families"}


def test_the_versions_are_those_of_the_projects_files() -> None:
    rows = compatibility_page.versions().splitlines()
    assert "| Python | >=3.11 | |" in rows
    (vllm,) = [row for row in rows if row.startswith("| vllm |")]
    assert re.fullmatch(r"\| vllm \| >=0\.\d+,<0\.\d+ \| 0\.\d+\.\d+ \|", vllm)


def test_the_benchmarks_page_lists_every_benchmark() -> None:
    text = benchmarks_page.PAGE.read_text(encoding="utf-8")
    assert text == benchmarks_page.written(text, {}), "PYTHONPATH=. python -m benchmarks.page writes it"
    assert {*benchmarks_page.recorded(text)} <= {*benchmarks_page.names()}


@pytest.fixture
def record() -> Record:
    rows = [
        Row(claim="a | b", value="0.9", target="<= 1", met=True),
        Row(claim="c", value="2", target="<= 1", met=False),
    ]
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
