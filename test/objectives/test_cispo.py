"""The weight is clipped and a constant; every token keeps its gradient."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from support.naive import Answer, check_against, token_mean
from support.rollouts import by_hand, total
from torchrl_moe.objectives import CISPOLoss


def test_golden_numbers() -> None:
    td, actor = by_hand()
    out = CISPOLoss(actor, clip_epsilon=(0.2, 0.28), entropy_bonus=False)(td)
    expected = -(1.28 * 2 * math.log(0.6) + 2 * math.log(0.4) - 0.8 * math.log(0.2)) / 3
    assert out.loss_objective.item() == pytest.approx(expected)
    assert out.clip_fraction.item() == pytest.approx(2 / 3)
    total(out).backward()
    assert actor.log_probs.grad is not None
    assert actor.log_probs.grad.flatten().tolist() == pytest.approx([0, -2.56 / 3, -2 / 3, 0, 0, 0.8 / 3])


def test_the_default_bounds_the_weight_from_above_only() -> None:
    td, actor = by_hand()
    expected = -(1.5 * 2 * math.log(0.6) + 2 * math.log(0.4) - 0.5 * math.log(0.2)) / 3
    assert CISPOLoss(actor)(td).loss_objective.item() == pytest.approx(expected)


def test_values_and_gradients_of_plain_loops() -> None:
    def loss(answer: Answer) -> list[Tensor]:
        ratios = [(pi - mu).exp().item() for pi, mu in zip(answer.pi, answer.mu, strict=True)]
        weights = [min(max(ratio, 0.7), 1.2) for ratio in ratios]
        return [-w * a * pi for w, a, pi in zip(weights, answer.advantage, answer.pi, strict=True)]

    build = lambda actor: CISPOLoss(actor, clip_epsilon=(0.3, 0.2), entropy_bonus=False)  # noqa: E731
    check_against(build, loss, token_mean, per_token_advantages=True)


def test_a_dual_clip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CISPOLoss has no dual_clip, got 3.0"):
        CISPOLoss(by_hand()[1], dual_clip=3.0)
