"""Load, balancing loss and z-loss by hand, against naive fp64 code and transformers, and what no split may change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrl_moe.objectives import load_balancing as balance

NAN, INF = float("nan"), float("inf")
loss: Any = balance.load_balancing_loss


def logits_of(*rows: tuple[float, ...]) -> Tensor:
    """One sequence, one layer."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None]


def every(logits: Tensor) -> Tensor:
    return torch.ones(logits.shape[:-1], dtype=torch.bool)


def random(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits, torch.rand(*shape[:2], generator=generator) < 0.7


def test_pads_dense_layers_and_broken_rows_are_no_rows() -> None:
    logits = torch.ones(1, 4, 3, 4)
    logits[:, :, 0] = 0  # a dense layer
    logits[:, 1:, 1] = 0  # another one: what its pads hold says nothing
    logits[0, 1, 2, 2] = INF
    logits[0, 3, 2] = 0  # one token's logits may be 0
    rows = balance.known_rows(logits, torch.tensor([[False, True, True, True]]))
    assert not rows[..., :2].any()
    assert rows[0, :, 2].tolist() == [False, False, True, True]


def test_choices_are_counted_and_measured() -> None:
    logits = torch.tensor([[[[3.0, 1, 2], [9, 8, 7]], [[1, 2, 3], [NAN, NAN, NAN]]]])
    counts = balance.choice_counts(logits, balance.known_rows(logits, torch.ones(1, 2, dtype=torch.bool)), 2)
    assert counts.tolist() == [[[1, 1, 2], [1, 1, 0]]]
    share = balance.load_share(torch.tensor([[1.0, 1, 1, 1], [2, 2, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0]]))
    assert share.tolist() == [[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0], [0] * 4]
    torch.testing.assert_close(balance.load_entropy(share), torch.tensor([1, 0.5, 0, NAN]), equal_nan=True)
    torch.testing.assert_close(balance.max_load(share), torch.tensor([1.0, 2, 4, NAN]), equal_nan=True)


LN3 = math.log(3)


def naive(logits: Tensor, mask: Tensor, top_k: int, scoring: str, per_sequence: bool) -> tuple[Tensor, Tensor]:
    """Token by token."""
    experts, losses, squares = logits.shape[-1], [], []
    groups = list(zip(logits, mask, strict=True)) if per_sequence else [(logits.flatten(0, 1), mask.flatten())]
    for layer in range(logits.shape[2]):
        per_group = []
        for group, keep in groups:
            rows = group[keep][:, layer]
            if not len(rows):
                continue
            share = torch.zeros(experts, dtype=rows.dtype)
            for row in rows:
                share[row.topk(top_k).indices] += 1 / (top_k * len(rows))
            score = rows.sigmoid() / rows.sigmoid().sum(-1, keepdim=True) if scoring == "sigmoid" else rows.softmax(-1)
            per_group.append(experts * (share * score.mean(0)).sum())
        losses.append(sum(per_group) / len(per_group))
        squares.append(logits[mask][:, layer].exp().sum(-1).log().square().mean())
    return sum(losses) / len(losses), sum(squares) / len(squares)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_values_and_gradients_are_those_of_naive_code(scoring: Any, per_sequence: bool) -> None:
    logits, mask = random(3, 4, 5, 3, 6)
    mask[2] = False  # a sequence without a token
    logits.requires_grad_()
    rows = balance.known_rows(logits, mask)
    ours = loss(logits, rows, 2, scoring=scoring, per_sequence=per_sequence), balance.z_loss(logits, rows)
    for got, wanted in zip(ours, naive(logits, mask, 2, scoring, per_sequence), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-7)
        ((one,), (other,)) = (torch.autograd.grad(value, logits, retain_graph=True) for value in (got, wanted))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
        assert one.abs().max() > 1e-3


def test_without_the_whole_batchs_load_parts_are_balanced_one_by_one() -> None:
    logits = torch.cat([logits_of((LN3, 0), (LN3, 0)), logits_of((0, LN3), (0, LN3))])
    parts = [loss(one, every(one), 1, num_rows=torch.tensor([4])) for one in logits.split(1)]
    assert sum(parts).item() == pytest.approx(1.5)  # 1 for the whole batch


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x, r: balance.known_rows(x, r), "mask must have 2 dimensions, got 3"),
        (lambda x, r: balance.known_rows(x, r[:, :1, 0]), r"router_logits must have shape \[1, 1, L, E\]"),
        (lambda x, r: balance.known_rows(x.long(), r[..., 0]), "router_logits must have a floating point dtype"),
        (lambda x, r: balance.choice_counts(x, r[..., 0], 1), r"rows must have shape \[1, 2, 1\], got \[1, 2\]"),
        (lambda x, r: balance.choice_counts(x[0], r, 1), "router_logits must have 4 dimensions, got 3"),
        (lambda x, r: loss(x, r, 3), r"top_k must be in 1\.\.2, .* got 3"),
        (lambda x, r: loss(x, r, 1, scoring="linear"), "scoring must be one of .* got 'linear'"),
        (lambda x, r: loss(x, r, 1, share=torch.ones(2)), r"share must have shape \[1, 2\], got \[2\]"),
        (lambda x, r: loss(x, r, 1, share=torch.ones(1, 2), per_sequence=True), "leave it out with per_sequence=True"),
        (lambda x, r: balance.z_loss(x, r[..., 0]), "rows must have shape"),
        (lambda x, r: balance.z_loss(x, r, torch.tensor(2)), r"num_rows must have shape \[1\], got \[\]"),
    ],
)
def test_bad_input_is_refused(call: Any, told: str) -> None:
    logits = logits_of((LN3, 0), (0, 1))
    with pytest.raises(ValueError, match=told):
        call(logits, every(logits))
