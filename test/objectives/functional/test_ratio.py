"""Ratios drop what is not finite; a sequence's ratio is a geometric mean; the interpolated policy lies in between."""

from __future__ import annotations

import math

import pytest
import torch

from support.sequences import INF, NAN, Run, every, row
from torchrl_moe.objectives import functional as F


def test_log_ratio_drops_what_is_not_finite_and_is_cut_at_20(run: Run) -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    ratio, known = run(F.log_ratio)(row(-1, NAN, -1, -INF, -1), row(-1.5, -1, NAN, -1, -9), mask)
    assert ratio.tolist() == [[0.5, 0, 0, 0, 0]]
    assert known.tolist() == [[True, False, False, False, False]]
    ratio, known = run(F.log_ratio)(row(-1, -60), row(-50, -1), every(2))
    assert ratio.tolist() == [[20, -20]]
    assert known.all()


def test_a_dropped_token_has_no_gradient() -> None:
    log_probs = row(-1, -2, NAN).requires_grad_()
    ratio, _ = F.log_ratio(log_probs, row(-1, NAN, -1), every(3))
    ratio.exp().sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[1, 0, 0]]


def test_the_ratio_of_a_sequence(run: Run) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    log_ratio = torch.tensor([[4.0, 1.0, 9.0], [0.5, 9.0, 9.0]], dtype=torch.float64).log()
    mean = run(F.sequence_log_ratio)(log_ratio, mask).exp()
    assert mean.flatten().tolist() == pytest.approx([2, 2, 2, 0.5, 0.5, 0.5])


def test_the_gradient_of_a_sequence_is_shared_or_each_token_s_own(run: Run) -> None:
    mask, pick = torch.tensor([[True, True, False]]), torch.tensor([1.0, 0.0, 0.0])
    log_ratio = row(4, 1, 9).log().requires_grad_()
    for per_token, expected in ((False, [1.0, 1.0, 0.0]), (True, [2.0, 0.0, 0.0])):
        ratio = run(F.sequence_log_ratio)(log_ratio, mask, per_token).exp()
        torch.testing.assert_close(ratio[0, :2].detach(), torch.full((2,), 2.0, dtype=torch.float64))
        (gradient,) = torch.autograd.grad((ratio * pick).sum(), log_ratio)
        assert gradient[0].tolist() == pytest.approx(expected)


def test_the_interpolated_policy(run: Run) -> None:
    log_probs = row(-1, -1, -1, -1).requires_grad_()
    prox = run(F.interpolated_log_probs)(log_probs, row(-3, -3, -3, -3), torch.tensor([[0, 1, 2, 4]]))
    assert prox.tolist() == [[-3, -3, -2, -1.5]]
    assert not prox.requires_grad


def test_effective_sample_size(run: Run) -> None:
    size = run(F.effective_sample_size)
    assert size(row(2, 2, 2, 2).log(), every(4)).item() == pytest.approx(1)
    assert size(row(1, 3, 1, 1).log(), every(4)).item() == pytest.approx(36 / (4 * 12))
    first_two = torch.tensor([[True, True, False, False]])
    assert size(row(1, 3, 9, 9).log(), first_two).item() == pytest.approx(0.8)
    assert size(row(1, 1, 1, 1), ~every(4)).item() == 0
    assert math.isfinite(size(row(20, 20, 20, 20), every(4)).item())
