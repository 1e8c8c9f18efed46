"""Weights and masks of a mismatch, by hand: ρ is 3 and 0.5 in one sequence, 1.25 in the other."""

from __future__ import annotations

import math

import pytest
import torch

from support.sequences import Run
from torchrl_moe.objectives import functional as F

LOG_RHO = torch.tensor([[3.0, 0.5, 9.0], [1.25, 9.0, 9.0]], dtype=torch.float64).log()
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_weights(run: Run) -> None:
    assert run(F.token_weight)(LOG_RHO)[MASK].tolist() == pytest.approx([3, 0.5, 1.25])
    assert run(F.sequence_weight)(LOG_RHO, MASK)[MASK].tolist() == pytest.approx([1.5, 1.5, 1.25])


def test_weights_are_constants_and_finite() -> None:
    log_rho = torch.full((1, 9), 19.0, requires_grad=True)
    mask = torch.ones(1, 9, dtype=torch.bool)
    for weight in (F.token_weight(log_rho), F.sequence_weight(log_rho, mask), F.sequence_weight(-log_rho, mask)):
        assert not weight.requires_grad
        assert weight.isfinite().all()
    assert F.sequence_weight(log_rho, mask)[0, 0].item() == pytest.approx(math.exp(20))


def test_bounds_are_inclusive(run: Run) -> None:
    weight = torch.tensor([[0.49, 0.5, 5.0, 5.01]])
    assert run(F.weight_within)(weight, 0.5, 5.0).tolist() == [[False, True, True, False]]


def test_geometric_mean(run: Run) -> None:
    mean = math.sqrt(1.5)
    for low, high, expected in (
        (0.9, mean + 1e-6, [True, False]),
        (mean - 1e-6, 1.26, [True, True]),
        (mean + 1e-6, 1.26, [False, True]),
    ):
        assert run(F.geometric_mean_within)(LOG_RHO, MASK, low, high)[:, 0].tolist() == expected


def test_mean_k3(run: Run) -> None:
    first = ((3 - 1 - math.log(3)) + (0.5 - 1 - math.log(0.5))) / 2
    second = 1.25 - 1 - math.log(1.25)
    for limit, expected in ((first + 1e-6, [True, True]), (first - 1e-6, [False, True]), (second - 1e-6, [False] * 2)):
        assert run(F.k3_mean_below)(LOG_RHO, MASK, limit)[:, 0].tolist() == expected


def test_off_policy_negatives(run: Run) -> None:
    log_ratio = torch.tensor([[-0.3, -0.1, 9.0], [-0.1, 9.0, 9.0]])  # mean log μ - log π: 0.2 and 0.1
    advantage = torch.tensor([[-1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]])
    left_out = run(F.off_policy_negatives)(log_ratio, advantage, MASK, 0.15)
    assert left_out[MASK].tolist() == [True, False, False]
    assert F.off_policy_negatives(log_ratio, advantage, MASK, 0.05)[MASK].tolist() == [True, False, True]


def test_staleness_weight(run: Run) -> None:
    assert run(F.staleness_weight)(torch.tensor([[0, 1, 2, 8]])).tolist() == [[1, 1, 0.5, 0.125]]
