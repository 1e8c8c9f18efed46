"""Does it learn? Runs of the trainer script: five seeds, a harder task, and faults that the checks must notice.

``python -m benchmarks.learning [--steps N] [--seeds N]``. Each run starts an engine of its own; all curves go to
``runs/bench/learning.png``.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Row, finish, median_range

ROOT = Path(__file__).parents[1]
RISE, RISE_HELD_OUT, DLOGP_BOUND = 0.4, 0.2, 1e-3
CONTROLS = ("shift_routes", "wrong_ids", "no_sync", "shuffle_advantages")
HARDER = ("task.digits=2", "task.held_out=200", "model.hidden_size=128", "warmup.max_seconds=120", "eval.every=5")
Rows = list[dict[str, str]]


def run(name: str, *overrides: str) -> Rows:
    """Run the trainer script; return its metrics."""
    folder = RESULTS / "learning" / name
    command = [sys.executable, str(ROOT / "tutorials/grpo/train.py"), f"out={folder}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    with (folder / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    print(f"{name}: reward {rise(rows):+.2f}", flush=True)
    return rows


def column(rows: Rows, name: str) -> list[float]:
    """Return the filled cells of a column."""
    return [float(row[name]) for row in rows if row[name]]


def rise(rows: Rows, name: str = "reward") -> float:
    """Return the mean of the last five cells less that of the first five."""
    values = column(rows, name)
    edge = min(5, len(values) // 2)
    return sum(values[-edge:]) / edge - sum(values[:edge]) / edge


def failures(rows: Rows) -> list[str]:
    """Return which checks of a healthy run these metrics fail."""
    checks = {
        "reward rises": rise(rows) >= RISE,
        "|dlogp| stays small": max(column(rows, "dlogp_max")) <= DLOGP_BOUND,
        "versions advance": column(rows, "version") == [step + 1 for step in range(len(rows))],
    }
    return [name for name, good in checks.items() if not good]


def draw(runs: dict[str, Rows]) -> None:
    """Draw all reward curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, rows in runs.items():
        axes = left if name.startswith("seed") else right
        axes.plot(column(rows, "step"), column(rows, "reward"), label=name)
    left.set(title="five seeds", xlabel="step", ylabel="mean rollout reward", ylim=(-0.02, 1.02))
    right.set(title="controls, and two-digit sums", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "learning.png", dpi=120)


def seed_rows(runs: dict[str, Rows]) -> list[Row]:
    """Say how the seeds did."""
    rises = [rise(rows) for name, rows in runs.items() if name.startswith("seed")]
    good = sum(value >= RISE for value in rises)
    return [
        Row(
            claim="one-digit sums: rise of mean rollout reward",
            value=f"{median_range(rises)}; {good} of {len(rises)} seeds",
            target=f">= {RISE} on {len(rises)} of {len(rises)}",
            met=good == len(rises),
        )
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run everything and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--control-steps", type=int, default=30)
    options = parser.parse_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Any] = {}
    for seed in range(options.seeds):
        runs[f"seed {seed}"] = run(f"seed-{seed}", f"seed={seed}", f"train.steps={options.steps}")
    rows = seed_rows(runs)
    for control in CONTROLS:
        metrics = runs[control] = run(control, f"control={control}", f"train.steps={options.control_steps}")
        noticed = failures(metrics)
        rows.append(
            Row(
                claim=f"control `{control}`: checks that fail",
                value=f"{', '.join(noticed) or 'none'} (reward {rise(metrics):+.2f})",
                target="at least one",
                met=bool(noticed),
            )
        )
    harder = runs["two-digit sums"] = run("harder", *HARDER, f"train.steps={options.steps}")
    gain = rise(harder, "held_out_reward")
    rows.append(
        Row(
            claim="two-digit sums: rise on problems never trained on, greedy",
            value=f"{gain:+.2f} (rollout reward {rise(harder):+.2f})",
            target=f">= {RISE_HELD_OUT}",
            met=gain >= RISE_HELD_OUT,
        )
    )
    draw(runs)
    finish("learning", rows)


if __name__ == "__main__":
    main()
