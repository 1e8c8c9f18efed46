"""The mean divides by what it is told, and sees nothing but what the mask selects."""

from __future__ import annotations

import pytest
import torch

from torchrl_moe.ops import masked_mean

VALUE = torch.tensor([[1.0, 2.0, 100.0], [4.0, 200.0, 300.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_the_denominator_is_the_one_given() -> None:
    assert masked_mean(VALUE, MASK, MASK.sum()).item() == pytest.approx(7 / 3)
    assert masked_mean(VALUE, MASK, 10).item() == pytest.approx(0.7)
    assert masked_mean(VALUE, MASK, torch.tensor(3.5)).item() == pytest.approx(2.0)
    assert masked_mean(VALUE, MASK, MASK.sum(-1), dim=-1).tolist() == [1.5, 4.0]
    assert masked_mean(VALUE, MASK, 2, dim=0).tolist() == [2.5, 1.0, 0.0]


def test_the_mean_of_nothing_is_zero_and_has_a_gradient() -> None:
    value = VALUE.clone().requires_grad_()
    nothing = torch.zeros_like(MASK)
    mean = masked_mean(value, nothing, nothing.sum())
    mean.backward()
    assert mean.item() == 0
    assert value.grad.tolist() == [[0.0] * 3] * 2


def test_nan_under_the_mask_reaches_neither_value_nor_gradient() -> None:
    value = torch.where(MASK, VALUE, float("nan")).requires_grad_()
    masked_mean(value, MASK, 3).backward()
    torch.testing.assert_close(value.grad, MASK / 3)


def test_low_precision_is_summed_in_float32() -> None:
    mean = masked_mean(torch.ones(257, dtype=torch.bfloat16), torch.ones(257, dtype=torch.bool), 1)
    assert mean.dtype == torch.float32
    assert mean.item() == 257  # bfloat16 has 256 and 258
    assert masked_mean(VALUE.double(), MASK, 3).dtype == torch.float64


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"value and mask must have the same shape, got value \[2, 3\], mask \[3\]"):
        masked_mean(VALUE, MASK[0], 1)
    with pytest.raises(ValueError, match=r"denominator and sum of value .* denominator \[3\], sum of value \[2\]"):
        masked_mean(VALUE, MASK, torch.ones(3), dim=-1)
    with pytest.raises(ValueError, match=r"value must have a floating point dtype, got torch.int64"):
        masked_mean(VALUE.long(), MASK, 1)
