"""Tests that run themselves as the ranks of a process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
WORLD_SIZE = 2


def run_as_ranks(file: str, argument: Path, seconds: float) -> None:
    """Run a test file as two ranks, each told its own by ``RANK``; all must end well."""
    environment = {**os.environ, "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, file, str(argument)],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=seconds)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, errors
