"""Run every benchmark, one process each, for ``docs/reference/benchmarks.md``: ``python -m benchmarks [name ...]``."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import page


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; return how many failed to run."""
    known = page.names()
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    failed = [
        name for name in names or known if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode
    ]
    page.write()
    for name in failed:
        print(f"benchmarks.{name} failed", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
