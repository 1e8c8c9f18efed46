"""Sums and means over a sequence see the tokens of the mask only; every function checks the shapes it is given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.sequences import NAN, Run
from torchrl_moe.objectives import functional as F
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


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: F.aggregate(x, y.bool()),
        lambda x, y: F.log_ratio(x, y, x.bool()),
        lambda x, y: F.sequence_log_ratio(x, y.bool()),
        lambda x, y: F.interpolated_log_probs(x, y, x.int()),
        lambda x, y: F.effective_sample_size(x, y.bool()),
        lambda x, y: F.kl_penalty(x, y, x.bool()),
        lambda x, y: F.kl_penalty(x, x, x.bool(), "k3", y),
        lambda x, y: F.kl_reward(x, y, x.bool(), 0.1),
        lambda x, y: F.trust_region(x, y, x.bool(), 1.0),
        lambda x, y: F.clipped_surrogate(x, y, 0.2, 0.2),
        lambda x, y: F.cispo_surrogate(x, x, y, 0.2, 0.2),
        lambda x, y: F.outside_divergence(x, y, x, 0.2, 0.2),
        lambda x, y: F.dppo_surrogate(x, x, y.bool(), 20.0),
        lambda x, y: F.sapo_surrogate(x, y),
        lambda x, y: F.sequence_weight(x, y.bool()),
        lambda x, y: F.geometric_mean_within(x, y.bool(), 0.9, 1.1),
        lambda x, y: F.k3_mean_below(x, y.bool(), 0.1),
        lambda x, y: F.off_policy_negatives(x, y, x.bool(), 0.1),
    ],
)
def test_two_tensors_of_other_shapes_are_refused(call: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(ValueError, match="must have 2 dimensions, got 3"):
        call(torch.ones(2, 3, 1), torch.ones(2, 3, 1))
    with pytest.raises(ValueError, match=r"must have the same shape, got .*\[2, 1\]"):
        call(torch.ones(2, 3), torch.ones(2, 1))


@pytest.mark.parametrize(
    "call",
    [
        F.token_weight,
        F.staleness_weight,
        lambda x: F.weight_within(x, 0.0, 1.0),
        lambda x: F.entropy_bonus(x, 1.0),
        lambda x: F.sequence_count(x, "token_mean"),
        lambda x: F.outside_clip_range(x, 0.2, 0.2),
    ],
)
def test_a_tensor_without_tokens_is_refused(call: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"\w+ must have 2 dimensions, got 1: shape \[3\]. It is \[B, T\]"):
        call(torch.ones(3))
