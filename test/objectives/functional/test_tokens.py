"""Sums and means over a sequence see the tokens of the mask only, and stand at each of its tokens."""

from __future__ import annotations

import pytest
import torch

from support.sequences import NAN, Run
from torchrl_moe.objectives.functional import check_tokens, select, sequence_mean, sequence_sum

VALUE = torch.tensor([[1.0, 3.0, NAN], [5.0, 60.0, 70.0], [8.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


def test_sums_and_means(run: Run) -> None:
    assert run(sequence_sum)(VALUE, MASK).tolist() == [[4.0] * 3, [5.0] * 3, [0.0] * 3]
    assert run(sequence_mean)(VALUE, MASK).tolist() == [[2.0] * 3, [5.0] * 3, [0.0] * 3]


def test_what_is_not_selected_has_no_gradient() -> None:
    value = VALUE.clone().requires_grad_()
    (select(MASK, value).sum() + sequence_mean(value, MASK).sum()).backward()
    assert value.grad is not None
    assert value.grad.tolist() == [[1 + 1.5, 1 + 1.5, 0], [1 + 3, 0, 0], [0, 0, 0]]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"mask must have 2 dimensions, got 1: shape \[3\]. It is \[B, T\], a value"):
        check_tokens(value=VALUE, mask=MASK[0])
    with pytest.raises(ValueError, match=r"must have the same shape, got value \[3, 3\], mask \[3, 2\]"):
        check_tokens(value=VALUE, mask=MASK[:, :2])
