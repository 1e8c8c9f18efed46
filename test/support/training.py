"""Short training runs on a tiny MoE, in which trainer and engine agree to rounding, so that every fault shows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from torchrl_moe.trainers.compose import load_config
from torchrl_moe.trainers.config import GRPOConfig

DLOGP_BOUND = 1e-4
RISE = 0.1  # healthy runs rise by 0.2 and more, those with shuffled advantages by less than 0.05
STEPS = 16


def short(out: Path, *overrides: str) -> GRPOConfig:
    """Settings of a run of 16 steps of 64 answers."""
    few = ("rollout.prompts_per_step=8", f"steps={STEPS}", "eval.every=8", "checkpoint.every=4", "log.progress=false")
    return load_config("tiny_sums", [f"out={out}", *few, *overrides])


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def numbers(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row[name]]


def versions(rows: list[dict[str, str]]) -> list[int]:
    """Those after each step, from that before the first; an engine that served another run goes on counting."""
    found = [int(row["version"]) for row in rows]
    return [version - int(rows[0]["version"]) + 1 for version in found]


def failed_checks(rows: list[dict[str, str]]) -> set[str]:
    """Names of the checks of a healthy run, synchronous and with a sync each step, that these metrics fail."""
    reward = numbers(rows, "reward")
    checks: dict[str, Any] = {
        "versions": versions(rows) == list(range(1, len(rows) + 1)),
        # each rollout was made with the weights that the step before has sent: agreement after every sync
        "agreement": max(numbers(rows, "dlogp_max")) <= DLOGP_BOUND,
        # over half of the run: one step's 64 answers leave an error of 0.06
        "learning": sum(reward[-8:]) / 8 - sum(reward[:4]) / 4 >= RISE,
    }
    return {name for name, good in checks.items() if not good}
