"""Learning rates; that weights move as the loss says is shown by test_token_stepper and test_grpo_trainer."""

from __future__ import annotations

import pytest

from torchrl_moe.trainers.config import OptimConfig
from torchrl_moe.trainers.learner import learning_rate


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.8536, 0.5, 0.0]),
    ],
)
def test_the_learning_rate_rises_and_falls(schedule: str, shares: list[float]) -> None:
    share = learning_rate(OptimConfig(schedule=schedule, warmup_steps=2), total=6)
    assert [round(share(step), 4) for step in (0, 1, 2, 3, 4, 6)] == shares
    assert share(100) == shares[-1]
