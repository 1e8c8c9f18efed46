"""Does it learn, and does replay help? Five seeds, synchronous and asynchronous, and faults that checks must notice.

``python -m benchmarks.learning [--steps N] [--seeds N]``. Each run starts its own engine; all curves go to
``runs/bench/learning.png``. Faults are tested in a smaller float32 run: only if trainer and engine agree to rounding is
every disagreement a fault.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import RESULTS, Row, finish, median_range

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tutorials/grpo/train.py"
RISE, RISE_HELD_OUT, SECONDS, DLOGP_BOUND = 0.4, 0.1, 180.0, 1e-3
QWEN3 = ("rollout.temperature=0.6", "rollout.top_p=0.95", "rollout.top_k=20")
"""The sampling settings that Qwen3's model card recommends."""
FAULTS = {
    **{
        name: f"hooks=[torchrl_moe.testing.fake_engine:{name}]"
        for name in ("shift_routes", "wrong_ids", "shuffle_advantages")
    },
    "no_sync": "engine.sync_every=1000",
}
ARMS = {"in turns": "tiny_cpu", "asynchronous": "tiny_async"}
SLACK = 0.05
"""The reward that the asynchronous arm may fall short by, after the same tokens."""
MISMATCH = ("dlogp_live", "dlogp_mean", "agreement")
ABOVE = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
Rows = list[dict[str, str]]


def run(name: str, config: str, *overrides: str) -> tuple[Rows, float]:
    """Run the trainer script; return its metrics and the seconds it took."""
    folder = RESULTS / "learning" / name.replace(" ", "-").replace("'", "").replace(",", "")
    command = [sys.executable, str(SCRIPT), "--config", config, f"out={folder}", "overwrite=true", *overrides]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    with (folder / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    print(f"{name}: reward {rise(rows):+.2f}, {seconds:.0f} s", flush=True)
    return rows, seconds


def column(rows: Rows, name: str) -> list[float]:
    """Return the filled cells of a column."""
    return [float(row[name]) for row in rows if row[name]]


def rise(rows: Rows, name: str = "reward") -> float:
    """Return the mean of the last five cells minus that of the first five."""
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
    """Draw rewards and mismatch of the seeds, and the rewards of the controls."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(13, 4), layout="constrained")
    seeds, mismatch, controls = figure.subplots(1, 3)
    colors = iter(f"C{number}" for number in range(10))
    for name, rows in runs.items():
        if name in FAULTS:
            controls.plot(column(rows, "step"), column(rows, "reward"), label=name)
            continue
        if not name.startswith("in turns"):
            continue
        style = {"color": next(colors), "alpha": 0.8}
        tested = [row for row in rows if row["held_out_reward"]]
        seeds.plot(column(rows, "step"), column(rows, "reward"), **style)
        seeds.plot(column(tested, "step"), column(tested, "held_out_reward"), ":", **style)
        mismatch.plot(column(rows, "step"), column(rows, "dlogp_mean"), **style)
        mismatch.plot(column(rows, "step"), column(rows, "dlogp_live"), ":", **style)
    for axes, solid, dotted in ((seeds, "rollouts", "held out, greedy"), (mismatch, "replayed", "live router")):
        lines = [Line2D([], [], color="grey", linestyle=style) for style in ("-", ":")]
        axes.legend(lines, [solid, dotted], frameon=False, fontsize="small", ncols=2, **ABOVE)
    controls.legend(frameon=False, fontsize="small", ncols=2, **ABOVE)
    seeds.set(ylabel="reward, a color per seed", ylim=(-0.02, 1.02))
    mismatch.set(ylabel="mean |log-prob, trainer - engine|", yscale="log")
    controls.set(ylabel="rollout reward, faults on purpose", ylim=(-0.02, 1.02))
    for axes in (seeds, mismatch, controls):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(RESULTS / "learning.png", dpi=120)


def held_out_gain(rows: Rows) -> float:
    """Return the last evaluation minus the first, which comes before any step."""
    values = column(rows, "held_out_reward")
    return values[-1] - values[0]


def removed(rows: Rows) -> float:
    """Return the share of the mismatch under the live router that replay removes, over all rollouts of a run."""
    return 1 - statistics.mean(column(rows, "dlogp_mean")) / statistics.mean(column(rows, "dlogp_live"))


def seed_rows(runs: list[Rows], seconds: list[float]) -> list[Row]:
    """Return the rows of the seeds, trained synchronously."""
    rises, gains = [rise(rows) for rows in runs], [held_out_gain(rows) for rows in runs]
    last = statistics.median(column(rows, "held_out_reward")[-1] for rows in runs)
    means = {name: statistics.median(statistics.mean(column(rows, name)) for rows in runs) for name in MISMATCH}
    return [
        _bar("rise of mean rollout reward", rises, RISE),
        _bar("rise on problems never trained on, greedy", gains, RISE_HELD_OUT, f", to {last:.2f}"),
        Row(
            claim="share of the mismatch that replay removes",
            value=f"{median_range([removed(rows) for rows in runs])}: |dlogp| {means['dlogp_live']:.1e} -> "
            f"{means['dlogp_mean']:.1e}; the live router agrees in {means['agreement']:.1%} of rows",
        ),
        Row(
            claim="seconds of a run, engine start included",
            value=median_range(seconds, 0),
            target=f"<= {SECONDS:.0f}",
            met=statistics.median(seconds) <= SECONDS,
        ),
    ]


def last_reward(rows: Rows) -> float:
    """Return the mean reward of the last five steps."""
    return statistics.mean(column(rows, "reward")[-5:])


def steps_seconds(rows: Rows) -> float:
    """Return the seconds of all steps, without evaluations and checkpoints."""
    return sum(sum(column(rows, f"seconds_{phase}")) for phase in ("generate", "score", "train", "sync"))


def arm_rows(arms: dict[str, list[Rows]]) -> list[Row]:
    """Compare synchronous with asynchronous training, seed by seed, after the same steps."""
    ours, others = arms["in turns"], arms["asynchronous"]
    pairs = list(zip(ours, others, strict=True))
    gaps = [last_reward(other) - last_reward(one) for one, other in pairs]
    held_out = [column(other, "held_out_reward")[-1] - column(one, "held_out_reward")[-1] for one, other in pairs]
    tokens = [column(rows, "trained_tokens")[-1] for one_arm in (ours, others) for rows in one_arm]
    found = [
        Row(
            claim=f"{name}: reward of the last five steps; seconds of all steps",
            value=f"{median_range([last_reward(rows) for rows in runs])}; "
            f"{median_range([steps_seconds(rows) for rows in runs], 1)}",
        )
        for name, runs in arms.items()
    ]
    return [
        *found,
        Row(
            claim="reward, asynchronous minus synchronous, after the same steps",
            value=f"{median_range(gaps)}; held out {median_range(held_out)}; tokens of a run {median_range(tokens, 0)}",
            target=f"median >= -{SLACK}",
            met=statistics.median(gaps) >= -SLACK,
        ),
    ]


def _bar(claim: str, values: list[float], target: float, more: str = "") -> Row:
    return Row(
        claim=claim,
        value=f"{median_range(values)}{more}",
        target=f"median >= {target}",
        met=statistics.median(values) >= target,
    )


def control_row(control: str, rows: Rows) -> Row:
    """Return the row of a fault: the checks that notice it."""
    noticed = failures(rows)
    return Row(
        claim=f"control `{control}`: checks that fail",
        value=f"{', '.join(noticed) or 'none'} (reward {rise(rows):+.2f})",
        target="at least one",
        met=bool(noticed),
    )


def main(arguments: list[str] | None = None) -> None:
    """Run everything and report; a run that breaks is a row that says so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--control-steps", type=int, default=30)
    options = parser.parse_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    steps = f"steps={options.steps}"
    plan: dict[str, tuple[str, ...]] = {
        f"{arm}, seed {seed}": (config, f"seed={seed}", steps)
        for seed in range(options.seeds)
        for arm, config in ARMS.items()
    }
    plan["Qwen3's sampling"] = ("tiny_cpu", *QWEN3, steps)
    # the trainer itself refuses most of them, where it is not told to train on
    control = ("tiny_sums", "eval.max_mismatch=null", f"steps={options.control_steps}")
    plan |= {name: (*control, fault) for name, fault in FAULTS.items()}
    runs: dict[str, Rows] = {}
    seconds: list[float] = []
    broken = []
    for name, arguments_ in plan.items():
        try:
            runs[name], took = run(name, *arguments_)
        except RuntimeError as error:
            print(error, flush=True)
            broken.append(Row(claim=name, value="broke: see above", target="ends", met=False))
        else:
            seconds += [took] if name.startswith("in turns") else []
    arms = {arm: [rows for name, rows in runs.items() if name.startswith(arm)] for arm in ARMS}
    rows = seed_rows(arms["in turns"], seconds) if arms["in turns"] else []
    rows += arm_rows(arms) if not broken else []
    if "Qwen3's sampling" in runs:
        rows.append(_bar("rise with Qwen3's sampling, seed 0", [rise(runs["Qwen3's sampling"])], RISE))
    rows += [control_row(name, runs[name]) for name in FAULTS if name in runs]
    draw(runs)
    finish("learning", rows + broken)


if __name__ == "__main__":
    main()
