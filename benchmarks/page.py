"""``docs/reference/benchmarks.md``: what each benchmark measures, and the last record of it, with machine and date.

``python -m benchmarks.page`` writes it from the records in ``runs/bench``; ``make bench`` does so at its end. Where a
benchmark has no record there, the page keeps the one that it has.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from benchmarks.report import RESULTS, Record, read_records, table

__all__ = ["PAGE", "listing", "names", "recorded", "summary", "write", "written"]

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reference" / "benchmarks.md"
NOT_BENCHMARKS = {"__init__", "__main__", "page", "report", "virtual_clock"}
LISTED = re.compile(r"(?<=<!-- list -->\n\n).*?(?=\n\n<!-- end of list -->)", re.DOTALL)
RECORDED = re.compile(r"^<!-- record of (\S+) -->\n\n(.*?)\n\n<!-- end of record -->$", re.DOTALL | re.MULTILINE)


def names() -> list[str]:
    """Every benchmark."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def summary(name: str) -> str:
    """The first sentence of a benchmark's docstring."""
    docstring = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`").replace("|", r"\|")


def recorded(text: str) -> dict[str, str]:
    """The records of a page, by benchmark."""
    return {match[1]: match[2] for match in RECORDED.finditer(text)}


def listing(shown: Collection[str]) -> str:
    """One row per benchmark: what it measures, and where its results are; on this page if it is ``shown``."""
    files = (page for page in sorted(PAGE.parents[1].rglob("*.md")) if page != PAGE and "_build" not in page.parts)
    pages = {os.path.relpath(page, PAGE.parent): page.read_text(encoding="utf-8") for page in files}
    lines = ["| benchmark | what it measures | results |", "| --- | --- | --- |"]
    for name in names():
        mention = re.compile(rf"benchmarks/{name}\.py|ARGS=\"?{name}\b")
        links = [f"[{Path(page).stem}]({page})" for page, text in pages.items() if mention.search(text)]
        own = [f"[below](#{name.replace('_', '-')})"] if name in shown else []
        lines.append(f"| `{name}` | {summary(name)} | {', '.join(own + links)} |")
    return "\n".join([*lines, "", f"{len(shown)} of {len(names())} have a record on this page."])


def written(text: str, records: Mapping[str, Record]) -> str:
    """Return a page with an updated list of benchmarks, and with these records in place of its old ones."""
    shown = recorded(text)
    for name, record in records.items():
        shown[name] = f"## {name.replace('_', '-')}\n\n{summary(name)}\n\n{record.measured}\n\n{table(record.rows)}"
    shown = {name: shown[name] for name in names() if name in shown}
    head = LISTED.sub(lambda _: listing(shown), text).partition("\n<!-- record of ")[0].rstrip()
    parts = [f"<!-- record of {name} -->\n\n{body}\n\n<!-- end of record -->" for name, body in shown.items()]
    return "\n\n".join([head, *parts]) + "\n"


def write() -> None:
    """Write the page."""
    known = {name: record for name, record in read_records(RESULTS).items() if name in names()}
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), known), encoding="utf-8")


if __name__ == "__main__":
    write()
