"""The estimators have the values of their definitions, and the expectations that their papers promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchrl_moe.ops import LOG_RATIO_LIMIT, bounded_log_ratio, extreme_fraction, k1, k2, k3

LN2 = math.log(2)
LOG_P = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
LOG_Q = LOG_P - torch.tensor([0.0, LN2, -2 * LN2], dtype=torch.float64)  # p/q = 1, 2, 1/4


def test_golden_values() -> None:
    assert k1(LOG_P, LOG_Q).tolist() == pytest.approx([0, LN2, -2 * LN2])
    assert k2(LOG_P, LOG_Q).tolist() == pytest.approx([0, LN2**2 / 2, 2 * LN2**2])
    assert k3(LOG_P, LOG_Q).tolist() == pytest.approx([0, -0.5 + LN2, 3 - 2 * LN2])


def test_k1_and_k3_have_the_expectation_of_the_divergence() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    divergence = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * k1(p.log(), q.log())).sum(), divergence)
    torch.testing.assert_close((p * k3(p.log(), q.log())).sum(), divergence)


def test_ratios_are_bounded_and_stay_finite() -> None:
    far = torch.tensor([-500.0])
    near = torch.tensor([-0.1])
    assert bounded_log_ratio(near, far).item() == LOG_RATIO_LIMIT
    assert all(estimate(near, far).isfinite().all() for estimate in (k1, k2, k3))
    assert all(estimate(far, near).isfinite().all() for estimate in (k1, k2, k3))
    assert bounded_log_ratio(near, torch.tensor([float("nan")])).isnan().all()
    half = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert bounded_log_ratio(half, half).dtype == torch.float32
    assert bounded_log_ratio(half, half.double()).dtype == torch.float64


def test_gradients() -> None:
    log_p = LOG_P.clone().requires_grad_()
    for estimate in (k1, k2, k3):
        assert torch.autograd.gradcheck(lambda x, f=estimate: f(x, LOG_Q), log_p)


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
