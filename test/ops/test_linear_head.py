"""Tiles of a linear head at the limits of numbers and of memory. What they add up to is in ``test_log_probs.py``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_moe.ops.linear_head import LinearHead, RowScores, RowVocabularies, backward_tiles, forward_tiles


@pytest.mark.parametrize("elements", [2, 10_000])
def test_the_gradient_of_a_word_left_out_of_every_row_is_exactly_zero(elements: int) -> None:
    """Also where its logit, far above those of the ids kept, has an exponential that overflows."""
    weight = torch.tensor([[1.0], [1000.0], [2.0], [-1000.0]])
    kept = RowVocabularies(torch.tensor([0, 2, 1, 3]), torch.tensor([2, -2]))
    one = LinearHead([torch.ones(2, 1)], [weight], torch.zeros(4), 1.0, 0.0, kept)
    tokens, ones = torch.tensor([0, 2]), torch.ones(2)
    scores = forward_tiles(one, tokens, True, elements)
    p = 1 / (1 + math.e)
    assert (scores.chosen - scores.log_sum).exp().tolist() == pytest.approx([p, 1 - p])
    assert scores.entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p)] * 2)
    grads = backward_tiles(one, tokens, scores, (ones, 0 * ones), [True, True, True], elements)
    assert grads.weights[0][[1, 3]].tolist() == [[0.0], [0.0]]
    assert grads.bias.tolist() == pytest.approx([1 - 2 * p, 0, 2 * p - 1, 0])  # 1[chosen] - p, both rows together


def test_large_logits_neither_overflow_nor_vanish() -> None:
    one = LinearHead([torch.ones(2, 1)], [torch.tensor([[-3e4], [1e4], [3e4]])], None, 1.0, 0.0)
    scores = forward_tiles(one, torch.tensor([2, 0]), True, 1)
    assert (scores.chosen - scores.log_sum).tolist() == [0.0, -6e4]
    assert scores.entropy.tolist() == [0.0, 0.0]

    one = LinearHead([torch.ones(1, 1)], [torch.zeros(2, 1)], torch.tensor([0.0, -math.inf]), 1.0, 0.0)
    scores = forward_tiles(one, torch.tensor([1]), True, 2)
    assert (scores.chosen - scores.log_sum).item() == -math.inf  # a chosen word of probability 0 says so
    assert scores.entropy.item() == 0


def test_weight_gradients_of_half_precision_are_summed_in_float32() -> None:
    """1 024 rows of gradient -1/2 or 1/2: in bfloat16, a sum stops growing at 256."""
    rows = 1024
    one = LinearHead([torch.ones(rows, 1).bfloat16()], [torch.zeros(2, 1).bfloat16()], None, 1.0, 0.0)
    scores = RowScores(torch.zeros(rows), torch.full((rows,), math.log(2)), torch.zeros(0))
    grads = backward_tiles(
        one, torch.zeros(rows, dtype=torch.long), scores, (torch.ones(rows), torch.ones(rows)), [False, True, False], 2
    )
    assert grads.weights[0].dtype == torch.bfloat16
    assert grads.weights[0][:, 0].tolist() == [512.0, -512.0]


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_tensor_is_larger_than_a_tile() -> None:
    rows, columns, elements = 100, 120, 300
    one = LinearHead([torch.randn(rows, 2)], [torch.randn(columns, 2)], None, 1.0, 0.0)
    tokens, ones = torch.zeros(rows, dtype=torch.long), torch.ones(rows)
    with Largest() as largest:
        scores = forward_tiles(one, tokens, True, elements)
        backward_tiles(one, tokens, scores, (ones, ones), [True, True, False], elements)
    assert columns * 2 < largest.numel <= elements


def test_an_id_that_stands_twice_counts_once_and_sizes_of_int8_do_not_wrap() -> None:
    kept = RowVocabularies(torch.tensor([1, 1, 0, 0]), torch.tensor([2, -2]))
    kept.check_values(torch.tensor([1, 1]), 2)
    filled = kept.tiled(2, 2, 2).fill_(torch.ones(2, 2), slice(0, 2), slice(0, 2), 0)
    assert filled.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    kept = RowVocabularies(torch.arange(128), torch.tensor([-128], dtype=torch.int8))
    kept.check_values(torch.tensor([128]), 129)
    assert kept.rows().tolist() == [0] * 128
