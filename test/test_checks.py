"""Each check passes what it should and says what, got, allowed and what to do where it does not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe import _checks
from torchrl_moe.errors import RouteShapeError, RouteValueError

MOE = (1, 2)


def routes(*rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """``[N, 3, 2]``; layer 0 is dense."""
    return torch.tensor([[[-1, -1], *row] for row in rows], dtype=torch.int8)


INT8, UINT8, INT64, BOOL = (torch.zeros(1, dtype=kind) for kind in (torch.int8, torch.uint8, torch.int64, torch.bool))
UINT16 = np.ones(1, np.uint16)
A, B = torch.zeros(2, 3), torch.zeros(2, 4)
DO: dict[str, Any] = {"hint": "Do this."}


def test_what_fits_passes() -> None:
    _checks.check_rank("x", A, 2)
    _checks.check_rank("x", np.zeros(()), 0)
    _checks.check_same_shape({"a": A, "b": np.zeros((2, 3))})
    _checks.check_same_shape({})
    for value in (UINT8, torch.zeros(1, dtype=torch.uint16), INT8, INT64, UINT16, np.zeros(1, np.int32)):
        _checks.check_integer("x", value)
    _checks.check_integer("x", INT8, signed=True)
    _checks.check_floating("x", torch.zeros(1, dtype=torch.bfloat16))
    _checks.check_rows("x", 3, 3)
    _checks.check_route_dtype("x", torch.int8, torch.int8, 64)


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


ENGINE_ROWS = np.array([[[0, 0], [5, 3]]], dtype=np.uint8)


def engine_rows(rows: Any = ENGINE_ROWS, num_tokens: int = 2) -> None:
    """Two tokens, one row; layer 0 is dense, 8 experts, top 2."""
    _checks.check_engine_rows(rows, (num_tokens, 2, 2), 8, (0,))


@pytest.mark.parametrize(
    ("rows", "num_tokens", "error", "text"),
    [
        ([[[0, 0], [5, 8]]], 2, RouteValueError, "token 0, layer 1 holds expert 8 in [5, 8]"),
        ([[[0, 0], [-1, 3]]], 2, RouteValueError, "token 0, layer 1 holds expert -1"),
        ([[[0, 4], [5, 3]]], 2, RouteValueError, "token 0, layer 0 holds expert 4 in [0, 4]; the layer has no router"),
        ([[[0.0, 0], [5, 3]]], 2, RouteValueError, "integer dtype, got float64"),
        ([[[0, 0], [5, 3]]], 4, RouteShapeError, "must have 3 rows, got 1"),
        ([[[0, 0], [5, 3]]], 1, RouteShapeError, "must have 0 rows, got 1"),
        ([[[0, 0]]], 2, RouteShapeError, "must have shape [rows, 2, 2], got [1, 1, 2]"),
        ([[[0], [5]]], 2, RouteShapeError, "must have shape [rows, 2, 2], got [1, 2, 1]"),
        ([[0, 0], [5, 3]], 2, RouteShapeError, "must have shape [rows, 2, 2], got [2, 2]"),
    ],
)
def test_engine_rows_that_do_not_fit(rows: Any, num_tokens: int, error: type[Exception], text: str) -> None:
    engine_rows()
    engine_rows(rows=np.array([[[0, 0], [5, 3]]]))
    engine_rows(rows=np.zeros((0, 2, 2), dtype=np.uint8), num_tokens=1)  # these fit
    with pytest.raises(error, match=f"^engine rows.*{re.escape(text)}"):
        engine_rows(rows=np.array(rows), num_tokens=num_tokens)


def test_row_names() -> None:
    single, flat, nested = (
        _checks.RowNames(batch, lengths) for batch, lengths in [((), [4]), ((2,), [3, 5]), ((2, 2), [1, 2, 3, 4])]
    )
    assert [single.of("x", 0), single.row(3)] == ["x", "token 3"]
    assert [flat.of("x", 1), flat.row(2), flat.row(3)] == ["x of sample 1", "sample 0, token 2", "sample 1, token 0"]
    assert [nested.of("x", 2), nested.row(5)] == ["x of sample (1, 0)", "sample (1, 0), token 2"]


def check_routes(rows: torch.Tensor, moe_layers: tuple[int, ...] = MOE, num_experts: int = 8, **given: Any) -> None:
    _checks.check_routes(rows, moe_layers=moe_layers, num_experts=num_experts, **given)


def test_good_routes_pass() -> None:
    good = routes([[0, 1], [7, 0]], [[-1, -1], [3, 2]], [[-1, -1], [-1, -1]])
    for rows in (good, good.long(), good[:0]):
        check_routes(rows)
    check_routes(good, keep=torch.tensor([True, True, False]))
    check_routes(torch.zeros(2, 1, 1, dtype=torch.int8), (0,), 4)  # expert zero alone, at top 1
    for num_experts, dtype in ((128, torch.int8), (129, torch.int16), (32768, torch.int16)):  # the largest ids
        check_routes(torch.tensor([[[num_experts - 1, 0]]], dtype=dtype), (0,), num_experts)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ([8, 1], "holds expert 8 in [8, 1]; allowed are 0..7"),
        ([1, -2], "holds expert -2 in [1, -2]; allowed are 0..7"),
        ([-2, -2], "holds expert -2 in [-2, -2]"),
        ([-1, 5], "holds [-1, 5], which is partly -1"),
        ([0, -1], "holds [0, -1], which is partly -1"),
        ([0, 0], "holds [0, 0]: all zeros"),
        ([6, 6], "holds expert 6 twice in [6, 6]"),
    ],
)
def test_a_bad_row_is_named(row: list[int], text: str) -> None:
    bad = routes([[0, 1], [2, 3]], [[4, 5], row], [row, row])
    with pytest.raises(RouteValueError, match=rf"^routed_experts: row 1, layer 2 {re.escape(text)}"):
        check_routes(bad)


def test_repeats_are_found_at_any_distance() -> None:
    for i in range(4):
        for j in range(i):
            row = torch.arange(4, dtype=torch.int16)
            row[i] = row[j]
            with pytest.raises(RouteValueError, match=f"holds expert {j} twice"):
                check_routes(row.view(1, 1, 4), (0,), 200)


def test_a_dense_layer_or_a_pad_with_a_route_is_named_and_where_names_the_row() -> None:
    bad = routes([[0, 1], [2, 3]])
    bad[0, 0] = 5
    with pytest.raises(RouteValueError, match=r"row 0, layer 0 holds \[5, 5\], .* no router; .* are \[1, 2\]"):
        check_routes(bad)
    padded, keep = routes([[0, 1], [2, 3]], [[-1, -1], [2, 3]]), torch.tensor([True, False])
    with pytest.raises(RouteValueError, match=r"token nine, layer 2 holds \[2, 3\], .* is a pad"):
        check_routes(padded, keep=keep, where=lambda row: "token nine")


def test_only_signed_integers_of_rank_three_are_routes() -> None:
    with pytest.raises(RouteShapeError, match=r"routes must have 3 dimensions, got 2: shape \[3, 2\]\."):
        check_routes(torch.zeros(3, 2, dtype=torch.int8))
    with pytest.raises(RouteValueError, match=r"routes must have a signed integer dtype, got torch\.uint8\."):
        check_routes(torch.zeros(1, 3, 2, dtype=torch.uint8))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "_CHUNK_ELEMENTS", 12)  # two rows of [3, 2]
    good = routes(*[[[0, 1], [2, 3]]] * 7)
    keep = torch.tensor([True] * 4 + [False] * 3)
    check_routes(good)
    with pytest.raises(RouteValueError, match=r"row 4, layer 1 .* is a pad"):
        check_routes(good, keep=keep)
    good[5, 2] = 6
    with pytest.raises(RouteValueError, match="row 5, layer 2 holds expert 6 twice"):
        check_routes(good)
    assert _checks.find_bad_routes(good, MOE, 8).nonzero().tolist() == [[5]]


def test_bad_routes_are_found_row_by_row() -> None:
    rows = routes([[0, 1], [2, 3]], [[0, 0], [2, 3]], [[-1, -1], [2, 3]], [[-1, 1], [2, 3]], [[0, 1], [2, 8]])
    assert _checks.find_bad_routes(rows, MOE, 8).tolist() == [False, True, False, True, True]
    assert _checks.find_bad_routes(rows[:0], MOE, 8).tolist() == []
