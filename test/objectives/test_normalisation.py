"""Denominators add up over ranks, and the gradient of two ranks is that of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from support.ranks import run_as_ranks
from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives import sum_over_ranks


def run_rank() -> Any:
    """Compare each aggregation of both ranks' rows with that of all; return some sums."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    features, weight = (
        torch.randn(5, 4, 3, dtype=torch.float64),
        torch.randn(3, dtype=torch.float64, requires_grad=True),
    )
    advantage, mask = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4) < 0.6

    def gradient(rows: slice, numbers: dict[str, Any], aggregation: Any) -> Tensor:
        surrogate = F.clipped_surrogate(0.1 * features[rows] @ weight, advantage[rows], 0.2, 0.2)
        loss = F.aggregate(surrogate, mask[rows], aggregation, **numbers)
        return torch.autograd.grad(loss, weight)[0]

    rows = slice(0, 2) if rank == 0 else slice(2, 5)
    for aggregation in ("token_mean", "prompt_mean", "sequence_mean"):
        own = {"num_tokens": float(mask[rows].sum()), "num_sequences": float(F.sequence_count(mask[rows], aggregation))}
        whole = gradient(slice(None), {}, aggregation)
        for averaged in (True, False):
            part = gradient(rows, sum_over_ranks(own, gradients_are_averaged=averaged), aggregation)
            distributed.all_reduce(part)
            torch.testing.assert_close(part / (2 if averaged else 1), whole, rtol=1e-9, atol=1e-12)
    tensors = {"flat": torch.arange(3) + rank, "square": torch.ones(2, 2)}
    sums = sum_over_ranks(tensors)
    assert sums["flat"].tolist() == [0.5, 1.5, 2.5]
    assert sums["square"].tolist() == [[1, 1], [1, 1]]
    return sum_over_ranks({"a": 1.0 + rank, ("b", "c"): 0.5}, gradients_are_averaged=False)


def test_two_ranks_are_one() -> None:
    assert run_as_ranks(run_rank) == [{"a": 3.0, ("b", "c"): 1.0}] * 2


def test_without_ranks_it_says_so() -> None:
    with pytest.raises(ValueError, match=r"sum_over_ranks needs a process group.*init_process_group first"):
        sum_over_ranks({"num_valid_tokens": 3.0})
