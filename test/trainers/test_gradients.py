"""The norm of a gradient is that of the whole, and none is scaled that is small enough."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from torchrl_moe.trainers.learner import by_mesh, clip_gradients
from torchrl_moe.trainers.ranks import Ranks


def weights(*gradients: list[float]) -> list[Tensor]:
    found: list[Tensor] = []
    for gradient in gradients:
        found.append(nn.Parameter(torch.zeros(len(gradient))))
        found[-1].grad = torch.tensor(gradient)
    return found


def grads(of: list[Tensor]) -> list[list[float]]:
    return [weight.grad.tolist() for weight in of if weight.grad is not None]


@pytest.mark.parametrize("limit", [None, 6.0])
def test_the_norm_is_over_all_and_what_is_small_stays(limit: float | None) -> None:
    own = [*weights([3.0, 0.0], [4.0]), nn.Parameter(torch.zeros(2))]
    assert clip_gradients(own, limit, Ranks()) == pytest.approx(5.0)
    assert grads(own) == [[3.0, 0.0], [4.0]]


def test_a_large_one_is_scaled_down() -> None:
    own = weights([3.0, 0.0], [4.0])
    assert clip_gradients(own, 1.0, Ranks()) == pytest.approx(5.0)
    assert [*chain(*grads(own))] == pytest.approx([0.6, 0.0, 0.8], abs=1e-5)


class Others(Ranks):
    """Ranks whose norms differ by rounding, or of which one is not finite."""

    def __init__(self, *norms: float) -> None:
        self._norms = norms

    def gather(self, value: float) -> list[float]:  # type: ignore[override]
        return [value, *self._norms]


def test_all_ranks_scale_by_the_same_norm() -> None:
    own = weights([3.0, 4.0])
    assert clip_gradients(own, 1.0, Others(5.0, 10.0)) == 10.0
    assert [*chain(*grads(own))] == pytest.approx([0.3, 0.4], abs=1e-5)


@pytest.mark.parametrize(("mine", "theirs"), [(math.inf, 1.0), (1.0, math.nan), (math.nan, 1.0)])
def test_one_that_is_not_finite_anywhere_is_nobodys(mine: float, theirs: float) -> None:
    own = weights([mine])
    assert math.isnan(clip_gradients(own, 0.1, Others(theirs)))
    assert math.isnan(mine) or grads(own) == [[mine]]


def test_tensors_of_one_process_are_one_group() -> None:
    own = weights([1.0], [2.0])
    assert [len(group) for group in by_mesh(own)] == [2]
