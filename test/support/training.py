"""Short training runs on a tiny MoE, in which trainer and engine agree to rounding, so that every fault shows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.policies.unstack import model_metadata
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.trainers import MoEGRPOTrainer
from torchrl_moe.trainers.compose import load_config
from torchrl_moe.trainers.config import GRPOConfig, RolloutConfig

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
    """Those after each step, from that before the first; an engine that served another run continues counting."""
    return [int(row["version"]) - int(rows[0]["version"]) + 1 for row in rows]


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


LAYOUT = RoutingLayout(num_layers=2, moe_layers=(1,), top_k=2, num_experts=8)


def fake_model(**config: Any) -> Any:
    # transformers 5.19 splits a head over ranks evenly
    config = {"vocab_size": 260, **config}
    return make_tiny_moe("qwen3_moe", num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, **config)


def fake_fleet(count: int = 2, **kwargs: Any) -> FakeFleet:
    """Replicas that take such a model's weights."""
    return FakeFleet(count, expected=model_metadata(fake_model()), layout=LAYOUT, **kwargs)


def fake_config(out: Path, steps: int) -> GRPOConfig:
    config = GRPOConfig(out=str(out), steps=steps)
    config.rollout = RolloutConfig(prompts_per_step=2, group_size=2, max_new_tokens=3)
    config.log.loggers, config.log.progress, config.log.samples = [], False, 0
    config.eval.every = config.eval.mismatch_every = 0
    return config


def fake_run(fleet: FakeFleet, config: GRPOConfig, **given: Any) -> MoEGRPOTrainer:
    """A run of a fake engine's answers, half a second long."""
    rows = [{"prompt": f"{i}+1="} for i in range(8)]
    model = given.pop("model") if "model" in given else fake_model()  # a compiled one has no truth value
    given = {"dataset": rows, "rewards": lambda completion_ids: float(completion_ids[0] % 7), **given}
    given = {"tokenizer": ByteTokenizer(), **given}
    return MoEGRPOTrainer(model, config=config, engine=fleet, **given)
