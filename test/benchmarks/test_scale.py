"""Costs of a step on paper, by hand."""

from __future__ import annotations

import pytest

from benchmarks.scale import Assumptions, Step, bound, replicas_of
from torchrl_moe.trainers.plan import ModelSizes

COUNTS = {"parameters": 1000, "trained": 1000, "adapter": 0, "adapted": 0, "layer": 200, "outside": 200, "experts": 600}
COUNTS |= {"largest": 100, "hidden": 10, "expert_width": 5, "layers": 4, "top_k": 2, "num_experts": 8, "kv": 5}
SIZES = ModelSizes(**COUNTS, kv_heads=1)
GIVEN = Assumptions(
    flops=1e6, memory_bandwidth=1e6, network=1e3, training_share=0.5, decoding_share=0.25, tokens=10, slots=4
)


def test_a_step_by_hand() -> None:
    assert replicas_of(16, GIVEN) == 6
    step = Step.of(16, 32, SIZES, GIVEN)
    token = (2 * 1000 + 4 * 5 * 5 * 2) / 2 / (1e6 * 0.25)  # weights and four half answers, over two GPUs
    assert step.answer == pytest.approx(10 * token)
    active = 1000 - 100 - 600 * 6 / 8  # the embedding, and six experts of eight, do nothing
    assert step.train == pytest.approx(32 * 10 * 8 * active / (4 * 1e6 * 0.5))
    assert step.sync == pytest.approx(6 * 2000 / 1e3)
    assert bound({"rollouts": 2.0, "training": 3.0}) == "training"  # the longest
