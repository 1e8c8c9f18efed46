"""The soft gate, by hand and against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support.naive import Answer, check_against, prompt_mean
from support.rollouts import by_hand
from torchrl_moe.objectives import SAPOLoss


def gate(ratio: float, tau: float) -> float:
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def test_golden_numbers() -> None:
    td, actor = by_hand()
    out = SAPOLoss(actor, entropy_bonus=False)(td)
    first, second = -2 * (gate(1.5, 1.0) + gate(1.0, 1.0)) / 2, gate(0.5, 1.05)
    assert out.loss_objective.item() == pytest.approx((first + second) / 2)
    assert out.clip_fraction.item() == pytest.approx(2 / 3)  # outside 0.8..1.2; none of them is clipped
    other = SAPOLoss(actor, temperatures=(2.0, 3.0), aggregation="token_mean")(td)
    assert other.loss_objective.item() == pytest.approx((-2 * (gate(1.5, 2) + gate(1, 2)) + gate(0.5, 3)) / 3)


def test_values_and_gradients_of_plain_loops() -> None:
    def loss(answer: Answer) -> list[Tensor]:
        out = []
        for pi, mu, a in zip(answer.pi, answer.mu, answer.advantage, strict=True):
            tau = 1.0 if a > 0 else 1.5
            out.append(-a * 4 / tau / (1 + torch.exp(-tau * ((pi - mu).exp() - 1))))
        return out

    build = lambda actor: SAPOLoss(actor, temperatures=(1.0, 1.5), entropy_bonus=False)  # noqa: E731
    check_against(build, loss, prompt_mean, per_token_advantages=True)


@pytest.mark.parametrize("temperatures", [(1.0, 0.0), (1.0,), (-1.0, 1.0), (float("nan"), 1.0)])
def test_wrong_temperatures_are_refused(temperatures: Any) -> None:
    with pytest.raises(ValueError, match=r"temperatures must be .*, got"):
        SAPOLoss(by_hand()[1], temperatures=temperatures)


def test_a_dual_clip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SAPOLoss has no dual_clip, got 3.0"):
        SAPOLoss(by_hand()[1], dual_clip=3.0)
