"""Estimators have the values of their definitions and the papers' expectations; a mean sees what its mask selects."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchrl_moe.ops import LOG_RATIO_LIMIT, bounded_log_ratio, extreme_fraction, k1, k2, k3, masked_mean

LN2 = math.log(2)
LOG_P = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
LOG_Q = LOG_P - torch.tensor([0.0, LN2, -2 * LN2], dtype=torch.float64)  # p/q = 1, 2, 1/4


@pytest.mark.parametrize(
    ("estimate", "values"),
    [(k1, [0, LN2, -2 * LN2]), (k2, [0, LN2**2 / 2, 2 * LN2**2]), (k3, [0, -0.5 + LN2, 3 - 2 * LN2])],
)
def test_estimators(estimate: Callable[..., Tensor], values: list[float]) -> None:
    """By hand, with their gradient, finite however far apart; of k1 and k3 the mean is the divergence."""
    assert estimate(LOG_P, LOG_Q).tolist() == pytest.approx(values)
    assert torch.autograd.gradcheck(lambda x: estimate(x, LOG_Q), LOG_P.clone().requires_grad_())
    far, near = torch.tensor([-500.0]), torch.tensor([-0.1])
    assert estimate(near, far).isfinite() and estimate(far, near).isfinite()
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    if estimate is not k2:
        torch.testing.assert_close((p * estimate(p.log(), q.log())).sum(), (p * (p / q).log()).sum())


def test_ratios_are_bounded_and_computed_in_float32_at_least() -> None:
    near = torch.tensor([-0.1])
    assert bounded_log_ratio(near, torch.tensor([-500.0])).item() == LOG_RATIO_LIMIT
    assert bounded_log_ratio(near, torch.tensor([float("nan")])).isnan().all()
    half = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert bounded_log_ratio(half, half).dtype == torch.float32
    assert bounded_log_ratio(half, half.double()).dtype == torch.float64


def test_extreme_fraction_counts_both_directions() -> None:
    ratio = torch.tensor([[1.0, 1.9, 2.1, 0.4, 0.6, 9.0]])
    mask = torch.tensor([[True] * 5 + [False]])
    assert extreme_fraction(ratio.log(), mask).item() == pytest.approx(2 / 5)
    assert extreme_fraction(ratio.log(), mask, tau=1.5).item() == pytest.approx(4 / 5)
    assert extreme_fraction(ratio.log(), torch.zeros_like(mask)).item() == 0
    with pytest.raises(ValueError, match=r"tau must be greater than 1, got 1.0"):
        extreme_fraction(ratio.log(), mask, 1.0)
    with pytest.raises(ValueError, match="same shape"):
        extreme_fraction(ratio.log(), mask[:, 1:])


@pytest.mark.parametrize("estimate", [k1, k2, k3, bounded_log_ratio])
def test_wrong_shapes_and_dtypes_are_refused(estimate: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"must have the same shape, got log_\w \[\d\], log_\w \[\d\]"):
        estimate(LOG_P, LOG_Q[:2])
    with pytest.raises(ValueError, match=r"log_\w must have a floating point dtype, got torch.int64"):
        estimate(LOG_P.long(), LOG_Q)


VALUE = torch.tensor([[1.0, 2.0, 100.0], [4.0, 200.0, 300.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_the_denominator_of_a_mean_is_the_one_given() -> None:
    assert masked_mean(VALUE, MASK, MASK.sum()).item() == pytest.approx(7 / 3)
    assert masked_mean(VALUE, MASK, 10).item() == pytest.approx(0.7)
    assert masked_mean(VALUE, MASK, MASK.sum(-1), dim=-1).tolist() == [1.5, 4.0]
    assert masked_mean(VALUE, MASK, 2, dim=0).tolist() == [2.5, 1.0, 0.0]


def test_nan_under_the_mask_reaches_neither_value_nor_gradient_and_the_mean_of_nothing_is_zero() -> None:
    value = torch.where(MASK, VALUE, float("nan")).requires_grad_()
    mean = masked_mean(value, MASK, 3) + masked_mean(value, MASK & False, (MASK & False).sum())
    mean.backward()
    assert mean.item() == pytest.approx(7 / 3)
    torch.testing.assert_close(value.grad, MASK / 3)


def test_low_precision_is_summed_in_float32() -> None:
    mean = masked_mean(torch.ones(257, dtype=torch.bfloat16), torch.ones(257, dtype=torch.bool), 1)
    assert (mean.dtype, mean.item()) == (torch.float32, 257)  # bfloat16 has 256 and 258
    assert masked_mean(VALUE.double(), MASK, 3).dtype == torch.float64


def test_what_has_no_mean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"value and mask must have the same shape, got value \[2, 3\], mask \[3\]"):
        masked_mean(VALUE, MASK[0], 1)
    with pytest.raises(ValueError, match=r"denominator and sum of value .* denominator \[3\], sum of value \[2\]"):
        masked_mean(VALUE, MASK, torch.ones(3), dim=-1)
    with pytest.raises(ValueError, match=r"value must have a floating point dtype, got torch.int64"):
        masked_mean(VALUE.long(), MASK, 1)
