"""Run every benchmark, one process each, and write ``benchmarks/RESULTS.md``: ``python -m benchmarks [name ...]``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import RESULTS, Row, describe_machine, table

HERE = Path(__file__).parent
NOT_BENCHMARKS = {"__init__", "__main__", "report", "virtual_clock"}


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; return how many failed to run."""
    known = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    failed = [
        name for name in names or known if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode
    ]
    sections = [f"# Benchmarks\n\nWritten by `make bench`. {describe_machine()}\n"]
    for name in known:
        file = RESULTS / f"{name}.json"
        if file.exists() and name not in failed:
            rows = [Row(**row) for row in json.loads(file.read_text())]
            sections.append(f"## {name}\n\n{table(rows)}\n")
    (HERE / "RESULTS.md").write_text("\n".join(sections))
    for name in failed:
        print(f"benchmarks.{name} failed", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
