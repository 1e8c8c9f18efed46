"""What ``import torchrl_moe`` costs beyond torch and tensordict, in fresh interpreters, in pairs."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.report import Row, finish, median_range

PAIRS = 10
TARGET_MS = 50.0
# Both interpreters load torch and tensordict; only what follows is timed.
PROBE = """
import time, torch, tensordict
started = time.perf_counter()
{statement}
print((time.perf_counter() - started) * 1e3)
"""
STATEMENTS = {
    "import torchrl_moe": "import torchrl_moe",
    "from torchrl_moe.data import RoutedExperts": "from torchrl_moe.data import RoutedExperts",
    "from torchrl_moe.modules import LoadBalancer": "from torchrl_moe.modules import LoadBalancer",
}


def measure(statement: str) -> float:
    """Return the milliseconds of a statement in a fresh interpreter."""
    probe = [sys.executable, "-c", PROBE.format(statement=statement)]
    return float(subprocess.run(probe, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure each statement against an empty one."""
    rows = []
    for name, statement in STATEMENTS.items():
        extra = [measure(statement) - measure("pass") for _ in range(PAIRS)]
        promised = name == "import torchrl_moe"
        rows.append(
            Row(
                claim=f"`{name}` beyond torch and tensordict, ms",
                value=median_range(extra, 1),
                target=f"<= {TARGET_MS:.0f}" if promised else "",
                met=sorted(extra)[PAIRS // 2] <= TARGET_MS if promised else None,
            )
        )
    finish("import_time", rows)


if __name__ == "__main__":
    main()
