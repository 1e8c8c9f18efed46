"""A run whose trainer and engine share one GPU. It needs no vLLM: the engine is transformers'."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import pytest

from torchrl_moe.cli.main import main

pytestmark = pytest.mark.gpu


def run(out: Path, *settings: str) -> list[dict[str, str]]:
    """The rows of the metrics of a run of one-digit sums."""
    assert main(["train", "--config", "tiny_sums", f"out={out}", *settings]) == 0
    with (out / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def start(out: Path, dtype: str, *more: str) -> list[dict[str, str]]:
    engine = ["engine.kind=transformers", "~engine.arguments.kv_cache_memory_bytes", f"engine.arguments.dtype={dtype}"]
    return run(out, *engine, "log.progress=false", "eval.every=0", f"model.dtype={dtype}", *more)


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


@pytest.mark.parametrize(
    ("dtype", "transport", "far"), [("float32", "memmap", 1e-5), ("float32", "gloo", 1e-5), ("bfloat16", "memmap", 0.1)]
)
def test_a_run_learns_and_its_engine_has_each_step_s_weights(
    tmp_path: Path, dtype: str, transport: str, far: float
) -> None:
    rows = start(tmp_path, dtype, "steps=40", f"engine.sync.transport={transport}")
    rewards = column(rows, "reward")
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.2
    assert column(rows, "version") == [float(step + 1) for step in range(40)]
    assert max(column(rows, "dlogp_mean")) < far
    assert mean(column(rows, "dlogp_mean")) <= mean(column(rows, "dlogp_live"))
    if dtype == "float32":  # a stale engine's log-probs would be off by far more
        assert min(column(rows, "agreement")) > 0.99


def test_a_resumed_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """What was saved on the card comes back to it: weights, the optimizer's state, random states."""
    start(tmp_path, "float32", "steps=4", "checkpoint.every=2")
    rows = run(tmp_path, "steps=6", "resume=true")
    assert column(rows, "step") == [float(step) for step in range(6)]
    assert column(rows, "version") == [float(step + 1) for step in range(6)]
    assert max(column(rows, "dlogp_mean")) < 1e-5
