"""Golden numbers worked out by hand for each paper's surrogate, and who has a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.sequences import Run, row
from torchrl_moe.objectives import functional as F

RATIO, ADVANTAGE = row(1.5, 1.5, 0.5, 0.5, 1.1, 1.1), row(2, -2, 2, -2, 2, -2)


def gradient(surrogate: Callable[[Tensor], Tensor], log_ratio: Tensor = RATIO.log()) -> list[float]:  # noqa: B008
    log_ratio = log_ratio.clone().requires_grad_()
    return torch.autograd.grad(surrogate(log_ratio).sum(), log_ratio)[0][0].tolist()


# -- clipped ----------------------------------------------------------------------------------------------------------


def test_clipped_surrogate_in_each_corner(run: Run) -> None:
    loss = run(F.clipped_surrogate)(RATIO.log(), ADVANTAGE, 0.2, 0.28)
    assert loss[0].tolist() == pytest.approx([-2.56, 3.0, -1.0, 1.6, -2.2, 2.2])


def test_the_clip_range_may_be_tensors_and_only_clipped_tokens_lose_their_gradient() -> None:
    for low, high, expected in ((0.3, 0.28, [-1.25, 0.75]), (0.2, 0.2, [-1.2, 0.8])):
        loss = F.clipped_surrogate(row(1.25, 0.75).log(), row(1, -1), torch.tensor(low), torch.tensor(high))
        assert loss[0].tolist() == pytest.approx(expected)
    assert gradient(lambda x: F.clipped_surrogate(x, ADVANTAGE, 0.2, 0.28)) == pytest.approx([0, 3, -1, 0, -2.2, 2.2])


def test_a_dual_clip_bounds_negative_advantages_only(run: Run) -> None:
    ratio, advantage = row(5, 5, 2.5, 0.5), row(-2, 2, -2, -2)
    for bound, expected in ((3.0, [6, -2.56, 5, 1.6]), (None, [10, -2.56, 5, 1.6])):
        loss = run(F.clipped_surrogate)(ratio.log(), advantage, 0.2, 0.28, bound)
        assert loss[0].tolist() == pytest.approx(expected)
    surrogate: Any = lambda x: F.clipped_surrogate(x, advantage, 0.2, 0.28, 3.0)  # noqa: E731
    assert gradient(surrogate, ratio.log()) == pytest.approx([0, 0, 5, 0])


def test_outside_clip_range(run: Run) -> None:
    outside = run(F.outside_clip_range)(row(0.79, 0.81, 1.27, 1.29).log(), 0.2, 0.28)
    assert outside.tolist() == [[True, False, False, True]]


# -- CISPO ------------------------------------------------------------------------------------------------------------


def test_cispo_keeps_a_gradient_everywhere(run: Run) -> None:
    log_probs = row(-1, -2, -3).requires_grad_()
    log_ratio, advantage = row(1.5, 1.1, 0.5).log() + log_probs - log_probs.detach(), row(2, 2, -1)
    loss = run(F.cispo_surrogate)(log_ratio, log_probs, advantage, 0.2, 0.28)
    assert loss[0].tolist() == pytest.approx([1.28 * 2 * 1, 1.1 * 2 * 2, -0.8 * 3])
    (slope,) = torch.autograd.grad(loss.sum(), log_probs)
    assert slope[0].tolist() == pytest.approx([-2.56, -2.2, 0.8])


def test_a_low_of_one_bounds_the_weight_from_above_only() -> None:
    loss = F.cispo_surrogate(row(0.01, 9).log(), row(-1, -1), row(1, 1), 1.0, 4.0)
    assert loss[0].tolist() == pytest.approx([0.01, 5])


# -- DPPO -------------------------------------------------------------------------------------------------------------

OLD, NEW = row(0.4, 0.4, 0.4, 0.4, 0.01), row(0.6, 0.6, 0.2, 0.2, 0.05)
SIGNS = row(1, -1, 1, -1, 1)  # the second and third move back towards the old policy


def test_dppo_blocks_by_total_variation(run: Run) -> None:
    blocked = run(F.outside_divergence)(NEW.log(), OLD.log(), SIGNS, 0.15, 0.15)
    assert blocked.tolist() == [[True, False, False, True, False]]  # the last: ratio 5, distance 0.04
    wide_above = F.outside_divergence(NEW.log(), OLD.log(), SIGNS, 0.15, 0.25)
    assert wide_above.tolist() == [[False, False, False, True, False]]


def test_dppo_blocks_by_the_binary_kl(run: Run) -> None:
    up = 0.4 * math.log(0.4 / 0.6) + 0.6 * math.log(0.6 / 0.4)
    down = 0.4 * math.log(0.4 / 0.2) + 0.6 * math.log(0.6 / 0.8)
    for low, high, expected in (
        (down - 1e-6, up - 1e-6, [True, False, False, True, False]),
        (down + 1e-6, up - 1e-6, [True, False, False, False, False]),
        (down - 1e-6, up + 1e-6, [False, False, False, True, False]),
    ):
        assert run(F.outside_divergence)(NEW.log(), OLD.log(), SIGNS, low, high, "kl").tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_tokens_have_a_finite_divergence(dtype: torch.dtype) -> None:
    zero, certain = torch.zeros(1, 1, dtype=dtype), torch.tensor([[-1e-9]], dtype=dtype)
    assert not F.outside_divergence(zero, certain, torch.ones(1, 1), 0.05, 0.05, "kl").any()
    assert F.outside_divergence(zero, zero - 1, torch.ones(1, 1), 0.05, 0.05, "kl").all()


def test_dppo_does_not_clip_but_caps(run: Run) -> None:
    ratio, advantage = row(1.5, 50, 1.5, 0.1), row(2, 2, 2, -1)
    blocked = torch.tensor([[False, False, True, False]])
    loss = run(F.dppo_surrogate)(ratio.log(), advantage, blocked, 20.0)
    assert loss[0].tolist() == pytest.approx([-3, -40, 0, 0.1])
    surrogate: Any = lambda x: F.dppo_surrogate(x, advantage, blocked, 20.0)  # noqa: E731
    assert gradient(surrogate, ratio.log()) == pytest.approx([-3, -40, 0, 0.1])


# -- SAPO -------------------------------------------------------------------------------------------------------------


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_sapo(run: Run) -> None:
    loss = run(F.sapo_surrogate)(row(1.5, 0.5, 1).log(), row(2, -1, 0), 1.0, 1.05)
    assert loss[0].tolist() == pytest.approx([-4 * sigmoid(0.5) * 2, 4 / 1.05 * sigmoid(-0.525), 0])
    slope = gradient(lambda x: F.sapo_surrogate(x, row(2, -1), 1.0, 2.0), row(1, 1.5).log())
    assert slope == pytest.approx([-2, 1.5 * 4 * sigmoid(1) * (1 - sigmoid(1))])
