"""Does plain GRPO become unstable where GRPO with R3 does not? Both from one start, at several levels of staleness.

``python -m benchmarks.stability [--seeds N] [--steps N] [--sync-every N ...]``. A MoE of 6 layers with 64 experts is
warmed up once per seed and trained in float32 from bf16 rollouts, with and without replay, with the engine's weights
updated every 1, 4 and 8 steps. All runs share one engine. A run is called unstable if one of its metrics is not finite,
or if its reward falls by ``FALL`` from its best to its last five steps. There are no targets: the rows report what was
observed, and all curves go to ``runs/bench/stability.png``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch
from tensordict import set_list_to_stack

from benchmarks.report import RESULTS, Row, finish
from torchrl_moe.errors import TorchRLMoEError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.render.figures import legend_above
from torchrl_moe.trainers import MoEGRPOTrainer
from torchrl_moe.trainers.compose import load_config
from torchrl_moe.trainers.policy_model import PolicyModel

FALL, WINDOW = 0.2, 5
ARMS = {"R3": "with R3", "none": "plain"}
MODEL = (
    "model.arguments.num_hidden_layers=6", "model.arguments.num_experts=64", "model.arguments.num_experts_per_tok=8",
)  # fmt: skip
# Twice the trainer's default learning rate, so that stability does not just mean that nothing changes.
TRAINING = ("optim.lr=1e-3", "rollout.prompts_per_step=8")
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 64,
    "kv_cache_memory_bytes": 1 << 25,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its arm, seed and staleness, its rows of metrics, and whether it ended early."""

    arm: str
    seed: int
    sync_every: int
    rows: list[dict[str, Any]]
    broke: bool

    def column(self, name: str) -> list[float]:
        """Return a column's filled cells."""
        return [float(row[name]) for row in self.rows if row[name] != ""]

    @property
    def last(self) -> float:
        """Mean reward of the last steps; NaN for a run without a step."""
        return statistics.mean(self.column("reward")[-WINDOW:]) if self.rows else nan

    @property
    def fall(self) -> float:
        """The best mean reward of any window of steps, minus that of the last window."""
        reward = self.column("reward")
        windows = [statistics.mean(reward[max(0, end - WINDOW) : end]) for end in range(1, len(reward) + 1)]
        return max(windows[WINDOW - 1 :] or windows or [nan]) - self.last

    def median_k3(self, stale: bool) -> float:
        """Return the median k3 over steps whose rollouts come from the newest weights, or from older ones."""
        steps = [row for row in self.rows if bool(row["step"] % self.sync_every) == stale]
        return statistics.median([float(row["mismatch_kl"]) for row in steps] or [nan])

    @property
    def unstable(self) -> bool:
        """Whether the reward fell, or a metric was not finite."""
        numbers = self.column("loss") + self.column("mismatch_kl")
        return self.broke or not all(map(isfinite, numbers)) or self.fall >= FALL


class Bench:
    """The runs, one after another on one engine.

    Args:
        steps: of each run.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.folder = RESULTS / "stability"
        self._engine: AsyncVLLM | None = None

    def warm(self, seed: int) -> Path:
        """Warm up one model and save it; every run of the seed starts from it."""
        config = load_config("tiny_sums", [f"seed={seed}", *MODEL])
        made = PolicyModel.load(None, None, config.model)
        path = (self.folder / f"start-{seed}").absolute()
        made.save(path)
        return path

    def engine(self, path: Path) -> AsyncVLLM:
        """Return the engine; start a new one if the last run shut it down."""
        if self._engine is None or not self._engine.is_running:
            self.close()
            self._engine = AsyncVLLM.from_pretrained(path, **ENGINE)
        return self._engine

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = None

    def run(self, path: Path, seed: int, sync_every: int, arm: str) -> Outcome:
        """Train once; a run that fails because of its metrics is an outcome like any other."""
        name = f"{arm}-every-{sync_every}-seed-{seed}"
        sizes = (f"steps={self.steps}", f"checkpoint.every={self.steps}", f"eval.every={self.steps}")
        arguments = (
            f"out={self.folder / name}",
            "overwrite=true",
            f"model.source={path}",
            f"seed={seed}",
            f"loss.replay={arm}",
        )
        config = load_config("tiny_sums", [*arguments, *sizes, *TRAINING, f"engine.sync_every={sync_every}"])
        trainer = MoEGRPOTrainer(config=config, engine=self.engine(path))
        broke = False
        try:
            trainer.train()
        except (TorchRLMoEError, ValueError) as error:
            broke = True
            print(f"{name} broke at step {trainer.steps_done}: {error}", flush=True)
        finally:
            trainer.shutdown()
        outcome = Outcome(arm, seed, sync_every, trainer.record.rows, broke)
        print(f"{name}: last reward {outcome.last:.2f}, fall {outcome.fall:.2f}", flush=True)
        if broke:
            self.close()
        return outcome


def rows_of(outcomes: Sequence[Outcome], sync_every: int) -> list[Row]:
    """Return the rows of both arms at one staleness."""
    arms = {arm: [one for one in outcomes if (one.arm, one.sync_every) == (arm, sync_every)] for arm in ARMS}
    unstable = [f"{ARMS[arm]} {sum(one.unstable for one in runs)} of {len(runs)}" for arm, runs in arms.items()]
    found = [Row(claim=f"engine updated every {sync_every} steps: unstable runs", value="; ".join(unstable))]
    measures: dict[str, tuple[Callable[[Outcome], float], str]] = {
        "reward of the last five steps": (lambda one: one.last, ".2f"),
        "median k3 of trainer and engine, fresh rollouts": (lambda one: one.median_k3(stale=False), ".1e"),
        "median k3 of trainer and engine, stale rollouts": (lambda one: one.median_k3(stale=True), ".1e"),
        "greatest |dlogp|": (lambda one: max(one.column("dlogp_max"), default=nan), ".2f"),
    }
    for name, (measure, digits) in measures.items():
        values = [f"{ARMS[arm]} {spread([measure(one) for one in runs], digits)}" for arm, runs in arms.items()]
        found.append(Row(claim=f"engine updated every {sync_every} steps: {name}", value="; ".join(values)))
    return found


def spread(values: Sequence[float], digits: str) -> str:
    """Return the median, minimum and maximum of the runs; a run without a step is ignored."""
    values = [value for value in values if isfinite(value)]
    if not values:
        return "none"
    return f"{statistics.median(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def draw(outcomes: Sequence[Outcome], levels: Sequence[int]) -> None:
    """Draw reward and k3 of every run, one column per staleness."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(levels), 6.5), layout="constrained")
    for column, level in zip(figure.subplots(2, len(levels), sharey="row", squeeze=False).T, levels, strict=True):
        for one in outcomes:
            if one.sync_every != level:
                continue
            style = {"color": "tab:blue" if one.arm == "R3" else "tab:orange", "alpha": 0.7, "linewidth": 1}
            style |= {"label": ARMS[one.arm]} if one.seed == 0 else {}
            for axes, name in zip(column, ("reward", "mismatch_kl"), strict=True):
                axes.plot(one.column("step"), one.column(name), **style)
        column[0].set(ylabel="rollout reward", ylim=(-0.02, 1.02))
        column[1].set(xlabel="step", ylabel="k3, trainer and engine", yscale="log")
        legend_above(column[0], "engine updated " + ("every step" if level == 1 else f"every {level} steps"))
        legend_above(column[1])
        for axes in column:
            axes.grid(alpha=0.3)
    figure.savefig(RESULTS / "stability.png", dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """Run everything and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--sync-every", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args(arguments)
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    bench, outcomes = Bench(options.steps), []
    try:
        for seed in range(options.seeds):
            path = bench.warm(seed)
            for sync_every in options.sync_every:
                outcomes += [bench.run(path, seed, sync_every, arm) for arm in ARMS]
    finally:
        bench.close()
    draw(outcomes, options.sync_every)
    finish("stability", [row for level in options.sync_every for row in rows_of(outcomes, level)])


if __name__ == "__main__":
    main()
