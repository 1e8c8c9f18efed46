"""Each check says what, got, allowed and what to do.

What is said of values is in ``data/test_routed_experts.py`` and ``modules/replay/test_incoming.py``.
"""

from __future__ import annotations

import re
from types import EllipsisType
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe import _checks
from torchrl_moe.errors import RouteShapeError, RouteValueError

INT8, UINT8, INT64, BOOL = (torch.zeros(1, dtype=kind) for kind in (torch.int8, torch.uint8, torch.int64, torch.bool))
UINT16 = np.ones(1, np.uint16)
A, B = torch.zeros(2, 3), torch.zeros(2, 4)
DO: dict[str, Any] = {"hint": "Do this."}


def test_arrays_and_integers_of_any_kind_pass() -> None:
    _checks.check_rank("x", np.zeros(()), 0)
    _checks.check_same_shape({"a": A, "b": np.zeros((2, 3))})
    _checks.check_same_shape({})
    for value in (UINT8, torch.zeros(1, dtype=torch.uint16), INT8, INT64, UINT16, np.zeros(1, np.int32)):
        _checks.check_integer("x", value)


DTYPES = ("x", torch.uint8, torch.int8, 64)
SHAPE, VALUE = {"error": RouteShapeError, **DO}, {"error": RouteValueError, "signed": True, **DO}


@pytest.mark.parametrize(
    ("error", "words", "check", "given", "options"),
    [
        (ValueError, r"x must have 1 dimension, got 2", "rank", ("x", A, 1), {}),
        (RouteShapeError, r"3 dimensions, got 1: shape \[1\]\. Do this\.$", "rank", ("x", INT8, 3), SHAPE),
        (ValueError, "x .* integer dtype, got torch.bool", "integer", ("x", BOOL), {}),
        (ValueError, "x .* integer dtype, got torch.float32", "integer", ("x", A), {}),
        (RouteValueError, r"x .* signed integer dtype, got uint16\. Do this\.$", "integer", ("x", UINT16), VALUE),
        (ValueError, "signed .* torch.uint8", "integer", ("x", UINT8), {"signed": True}),
        (ValueError, "x .* floating .* torch.int64", "floating", ("x", INT64), {}),
        (RouteShapeError, "x must have 1 row, got 2", "rows", ("x", 2, 1), {}),
        (RouteShapeError, r"x must have 4 rows, got 2\. Do this\.$", "rows", ("x", 2, 4), DO),
        (RouteValueError, "int8 for 64 experts, got torch.uint8.*from_vllm", "route_dtype", DTYPES, {}),
        (ValueError, r"got a \[2, 3\], b \[2, 4\], c \[2, 3\]", "same_shape", ({"a": A, "b": B, "c": A},), {}),
    ],
)
def test_what_does_not_fit_is_refused(error: Any, words: str, check: str, given: Any, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=words) as caught:
        getattr(_checks, f"check_{check}")(*given, **options)
    assert caught.type is error


@pytest.mark.parametrize(
    ("shape", "expected", "wanted"),
    [
        ((2, 3), (2, 3), ""), ((2, 3), ("T", 3), ""), ((3,), (..., 3), ""), ((7, 2, 3), (..., "T", 3), ""),
        ((), (), ""), ((5,), (...,), ""),
        ((2, 3), (2, 4), "[2, 4]"), ((2, 3), ("T", 4), "[T, 4]"), ((3,), ("T", 3), "[T, 3]"),
        ((1, 2, 3), ("T", 3), "[T, 3]"), ((3,), (..., "T", 3), "[..., T, 3]"),
    ],
)  # fmt: skip
def test_shapes(shape: tuple[int, ...], expected: tuple[int | str | EllipsisType, ...], wanted: str) -> None:
    """Those without a text fit."""
    if not wanted:
        _checks.check_shape("x", shape, expected)
        return
    text = re.escape(f"x must have shape {wanted}, got {list(shape)}.")
    with pytest.raises(ValueError, match=f"{text} Do this"):
        _checks.check_shape("x", shape, expected, **DO)
    with pytest.raises(RouteShapeError, match=text):
        _checks.check_shape("x", shape, expected, error=RouteShapeError)


def test_the_structural_checks_are_static_under_compile() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        _checks.check_rank("x", x, 2)
        _checks.check_shape("x", x.shape, ("T", 3))
        _checks.check_same_shape({"x": x, "y": x})
        _checks.check_floating("x", x)
        return x + 1

    compiled = torch.compile(checked, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2, 3)).tolist() == [[1.0] * 3] * 2


def test_repeats_are_found_at_any_distance() -> None:
    for i in range(4):
        for j in range(i):
            row = torch.arange(4, dtype=torch.int16)
            row[i] = row[j]
            with pytest.raises(RouteValueError, match=f"holds expert {j} twice"):
                _checks.check_routes(row.view(1, 1, 4), (0,), 200)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "_CHUNK_ELEMENTS", 12)  # two rows of [3, 2]
    good = torch.tensor([[[-1, -1], [0, 1], [2, 3]]] * 7, dtype=torch.int8)  # layer 0 is dense
    keep = torch.tensor([True] * 4 + [False] * 3)
    _checks.check_routes(good, (1, 2), 8)
    with pytest.raises(RouteValueError, match=r"row 4, layer 1 .* is a pad"):
        _checks.check_routes(good, (1, 2), 8, keep=keep)
    good[5, 2] = 6
    with pytest.raises(RouteValueError, match="row 5, layer 2 holds expert 6 twice"):
        _checks.check_routes(good, (1, 2), 8)
    assert _checks.find_bad_routes(good, (1, 2), 8).nonzero().tolist() == [[5]]
