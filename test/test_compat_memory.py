"""Bytes of a computation, by hand; shapes without memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrl_moe._compat_memory import peak_bytes, without_memory


def test_what_is_freed_counts_until_then() -> None:
    def run() -> None:
        first = torch.ones(100)  # 400 B
        second = first + 1  # 800 B
        del first
        third = second + 1  # 800 B again
        del second, third

    assert peak_bytes(run) == 800


def test_views_and_changes_in_place_take_nothing() -> None:
    assert peak_bytes(lambda: torch.ones(10, 10).T.reshape(-1)[::2].add_(1)) == 400 + 400  # the reshape copies


def test_what_was_there_before_is_no_part() -> None:
    weight = torch.ones(100, requires_grad=True)
    # its square, the sum, and the gradients of the three; the last is kept by the weight
    assert peak_bytes(lambda: (weight * 1).sum().backward()) <= 400 + 4 + 4 + 400 + 400
    assert weight.grad is not None


def test_a_linear_layer_by_hand() -> None:
    layer = nn.Linear(30, 20, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)
    given = torch.ones(7, 30)
    out, scalar, grad_weight = 7 * 20 * 4, 4, 20 * 30 * 4
    peak = peak_bytes(lambda: layer(given).sum().backward())
    assert grad_weight <= peak <= grad_weight + out + 3 * scalar  # the output may be gone by then


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_have_their_shapes_and_gradients_without_memory(dtype: torch.dtype) -> None:
    with without_memory():
        rows = torch.zeros(10**6, 64, dtype=dtype, requires_grad=True)
        weight = torch.zeros(128, 64, 32, dtype=dtype, requires_grad=True)
        offsets = torch.zeros(128, dtype=torch.int32)
        out = torch.nn.functional.grouped_mm(rows, weight, offs=offsets)
        assert out.shape == (10**6, 32)
        out.sum().backward()
        assert rows.grad is not None and weight.grad is not None
        assert (rows.grad.shape, weight.grad.shape) == (rows.shape, weight.shape)


def test_a_module_changes_its_dtype_without_memory() -> None:
    with without_memory():
        layer = nn.Linear(10**6, 10**6)
        names = dict(layer.named_parameters())  # something that refers to them
        layer.to(torch.bfloat16)
        assert all(weight.dtype == torch.bfloat16 for weight in names.values())
