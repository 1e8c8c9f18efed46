"""DAPO is GRPO with the paper's clip range."""

from __future__ import annotations

import pytest
from torch import Tensor

from support.naive import Answer, check_against, clip, token_mean
from support.rollouts import by_hand
from torchrl_moe.objectives import DAPO, GRPOLoss


def test_golden_numbers() -> None:
    td, actor = by_hand()
    out = DAPO(actor, entropy_bonus=False)(td)
    assert out.loss_objective.item() == pytest.approx((-2.56 - 2 + 0.8) / 3)
    assert isinstance(DAPO(actor), GRPOLoss)
    other = DAPO(actor, clip_epsilon=(0.2, 0.4), aggregation="prompt_mean")(td)
    assert other.loss_objective.item() == pytest.approx(((-2.8 - 2) / 2 + 0.8) / 2)


def test_values_and_gradients_of_plain_loops() -> None:
    def loss(answer: Answer) -> list[Tensor]:
        ratios = [(pi - mu).exp() for pi, mu in zip(answer.pi, answer.mu, strict=True)]
        return [-min(r * a, clip(r, 0.8, 1.28) * a) for r, a in zip(ratios, answer.advantage, strict=True)]

    check_against(lambda actor: DAPO(actor, entropy_bonus=False), loss, token_mean, per_token_advantages=True)


def test_arguments_that_nobody_would_read_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'gama'"):
        DAPO(by_hand()[1], gama=1)
    with pytest.raises(ValueError, match=r"gamma must be None, got 1"):
        DAPO(by_hand()[1], gamma=1)
