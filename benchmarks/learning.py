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

from benchmarks.report import RESULTS, Row, finish, median_range

ROOT = Path(__file__).parents[1]
RISE, RISE_HELD_OUT, DLOGP_BOUND = 0.4, 0.2, 1e-3
CONTROLS = ("shift_routes", "wrong_ids", "no_sync", "shuffle_advantages")
# Warmed up on sums of which 70 % forget the carry: it must learn which of two rules is right, and use it on new sums.
HARDER = (
    "task.digits=2",
    "task.held_out=200",
    "warmup.mistake=forget_carry",
    "warmup.noisy_target=0.72",
    "warmup.max_seconds=150",
    "train.lr=2e-4",
    "eval.every=5",
)
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
    if not edge:
        raise RuntimeError(f"a rise of {name} needs two cells at least, got {len(values)}")
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
    held_out = [row for row in runs.get("two-digit sums", ()) if row["held_out_reward"]]
    right.plot(
        column(held_out, "step"), column(held_out, "held_out_reward"), "k--", label="two-digit sums, held out, greedy"
    )
    left.set(title="five seeds", xlabel="step", ylabel="mean rollout reward", ylim=(-0.02, 1.02))
    right.set(title="controls, and two-digit sums", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "learning.png", dpi=120)


def held_out_gain(rows: Rows) -> float:
    """Return the mean of the last three evaluations less the first, which comes after one step."""
    values = column(rows, "held_out_reward")
    return sum(values[-3:]) / 3 - values[0]


def seed_row(runs: dict[str, Rows], seeds: int) -> Row:
    """Say how the seeds did."""
    rises = [rise(rows) for name, rows in runs.items() if name.startswith("seed")]
    good = sum(value >= RISE for value in rises)
    return Row(
        claim="one-digit sums: rise of mean rollout reward",
        value=f"{median_range(rises) if rises else 'no run ended'}; {good} of {seeds} seeds",
        target=f">= {RISE} on {seeds} of {seeds}",
        met=good == seeds,
    )


def control_row(control: str, rows: Rows) -> Row:
    """Say which checks notice a fault."""
    noticed = failures(rows)
    return Row(
        claim=f"control `{control}`: checks that fail",
        value=f"{', '.join(noticed) or 'none'} (reward {rise(rows):+.2f})",
        target="at least one",
        met=bool(noticed),
    )


def harder_row(rows: Rows) -> Row:
    """Say whether what was learned holds for problems never seen."""
    gain, last = held_out_gain(rows), column(rows, "held_out_reward")[-1]
    return Row(
        claim="two-digit sums: rise on 200 problems never trained on, greedy",
        value=f"{gain:+.2f} (to {last:.2f}; rollout reward {rise(rows):+.2f})",
        target=f">= {RISE_HELD_OUT}",
        met=gain >= RISE_HELD_OUT,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run everything and report; a run that breaks is a row that says so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--control-steps", type=int, default=30)
    parser.add_argument("--harder-steps", type=int, default=120)
    options = parser.parse_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    plan = {f"seed {seed}": (f"seed={seed}", f"train.steps={options.steps}") for seed in range(options.seeds)}
    plan |= {name: (f"control={name}", f"train.steps={options.control_steps}") for name in CONTROLS}
    plan["two-digit sums"] = (*HARDER, f"train.steps={options.harder_steps}")
    runs: dict[str, Rows] = {}
    broken = []
    for name, overrides in plan.items():
        try:
            runs[name] = run(name.replace(" ", "-"), *overrides)
        except RuntimeError as error:
            print(error, flush=True)
            broken.append(Row(claim=name, value="broke: see above", target="ends", met=False))
    rows = [seed_row(runs, options.seeds)]
    rows += [control_row(name, runs[name]) for name in CONTROLS if name in runs]
    rows += [harder_row(runs["two-digit sums"])] if "two-digit sums" in runs else []
    draw(runs)
    finish("learning", rows + broken)


if __name__ == "__main__":
    main()
