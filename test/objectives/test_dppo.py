"""Tokens are blocked by how far their probability moved, not by its ratio."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support.naive import Answer, check_against, token_mean
from support.rollouts import GivenActor, by_hand, ragged, sample
from torchrl_moe.objectives import DPPOLoss, GSPOLoss


@pytest.mark.parametrize(
    ("arguments", "expected", "blocked"),
    [
        ({}, -2 / 3, 2 / 3),  # 0.4 became 0.6 and 0.2, both by 0.2 > 0.15
        ({"clip_epsilon": 0.25}, (-3 - 2 + 0.5) / 3, 0),
        ({"clip_epsilon": (0.15, 0.25)}, (-3 - 2) / 3, 1 / 3),
        ({"clip_epsilon": (0.25, 0.15)}, (-2 + 0.5) / 3, 1 / 3),
        ({"clip_epsilon": 0.25, "max_ratio": 1.2}, (-2.4 - 2 + 0.5) / 3, 0),
        ({"divergence": "kl"}, -2 / 3, 2 / 3),  # 0.081 and 0.105 > 0.05
        ({"divergence": "kl", "clip_epsilon": 0.1}, (-3 - 2) / 3, 1 / 3),
    ],
)
def test_golden_numbers(arguments: dict[str, Any], expected: float, blocked: float) -> None:
    td, actor = by_hand()
    out = DPPOLoss(actor, entropy_bonus=False, **arguments)(td)
    assert out.loss_objective.item() == pytest.approx(expected)
    assert out.clip_fraction.item() == pytest.approx(blocked)


@pytest.mark.parametrize("loss", [DPPOLoss, lambda actor, **given: GSPOLoss(actor, level="token", **given)])
def test_a_ratio_beyond_its_bound_keeps_its_gradient(loss: Any) -> None:
    """One token went from e^-22 to e^-1; DPPO counts it 20 times, GSPO's sequence has the ratio e^(20 / 3)."""
    td = ragged([sample(1, 3, advantage=torch.tensor([[-1.0]]))])
    td[0]["log_probs", "full"] = torch.tensor([math.nan, -22.0, -1.0, -1.0])
    actor = GivenActor(torch.tensor([[0.0, -1.0, -1.0, -1.0]]))
    loss(actor, entropy_bonus=False)(td).loss_objective.backward()
    assert actor.log_probs.grad is not None
    weights = [20.0, 1.0, 1.0] if loss is DPPOLoss else [math.exp(20 / 3)] * 3
    torch.testing.assert_close(actor.log_probs.grad, torch.tensor([[0.0, *weights]]) / 3)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_values_and_gradients_of_plain_loops(divergence: Any) -> None:
    def distance(p: Tensor, q: Tensor) -> Tensor:
        if divergence == "tv":
            return (p - q).abs()
        return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()

    def loss(answer: Answer) -> list[Tensor]:
        out = []
        for pi, mu, a in zip(answer.pi, answer.mu, answer.advantage, strict=True):
            p, q = pi.detach().exp(), mu.exp()
            further_out = p > q if a > 0 else p < q
            out.append(-(pi - mu).exp() * a * (0.0 if further_out and distance(p, q) > 0.01 else 1.0))
        return out

    build = lambda actor: DPPOLoss(actor, divergence=divergence, clip_epsilon=0.01, entropy_bonus=False)  # noqa: E731
    check_against(build, loss, token_mean, per_token_advantages=True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"divergence": "js"}, r"divergence must be one of \['tv', 'kl'\], got 'js'"),
        ({"max_ratio": 0.5}, "max_ratio must be a number of at least 1, got 0.5. It is 1 on policy"),
        ({"dual_clip": 3.0}, "DPPOLoss has no dual_clip, got 3.0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DPPOLoss(by_hand()[1], **arguments)
