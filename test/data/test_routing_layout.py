"""A layout holds what it was given, and refuses what no model has."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.data import RoutingLayout


def layout(**changes: Any) -> RoutingLayout:
    return RoutingLayout(**({"num_layers": 4, "moe_layers": (1, 3), "top_k": 2, "num_experts": 8} | changes))


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(1, torch.int8), (128, torch.int8), (129, torch.int16), (32768, torch.int16)]
)
def test_the_dtype_holds_every_id(num_experts: int, dtype: torch.dtype) -> None:
    made = layout(num_experts=num_experts, top_k=1)
    assert (made.dtype, made.numpy_dtype) == (dtype, np.dtype(str(dtype).removeprefix("torch.")))


def test_any_integers_become_plain_ones_and_the_other_layers_are_dense() -> None:
    made = layout(num_layers=np.int64(4), moe_layers=[np.int64(1), torch.tensor(3)], top_k=np.uint8(2))
    assert made == layout() != layout(top_k=1)
    assert {type(value) for value in (made.num_layers, made.top_k, *made.moe_layers)} == {int}
    assert pickle.loads(pickle.dumps(made)).dense_layers == (0, 2)
    assert dataclasses.replace(made, moe_layers=(0,)).dense_layers == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"moe_layers": ()}, "moe_layers is empty; a dense model has no layout: pass None"),
        ({"moe_layers": (3, 1)}, "moe_layers must ascend without repeats, got (3, 1)"),
        ({"moe_layers": (1, 1)}, "moe_layers must ascend without repeats, got (1, 1)"),
        ({"moe_layers": (1, 4)}, "moe_layers must lie in 0..3, got (1, 4)"),
        ({"moe_layers": (-1, 3)}, "moe_layers must lie in 0..3, got (-1, 3)"),
        ({"num_experts": 0}, "num_experts must lie in 1..32768, got 0"),
        ({"num_experts": 32769}, "num_experts must lie in 1..32768, got 32769"),
        ({"top_k": 0}, "top_k must lie in 1..num_experts = 1..8, got 0"),
        ({"top_k": 9}, "top_k must lie in 1..num_experts = 1..8, got 9"),
    ],
)
def test_what_no_model_has(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        layout(**changes)


@pytest.mark.parametrize("name", ["num_layers", "moe_layers", "top_k", "num_experts"])
@pytest.mark.parametrize("value", [None, True, 1.5, "3", b"x", 2**40, [True]])
def test_what_is_no_count_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        layout(**{name: value})
