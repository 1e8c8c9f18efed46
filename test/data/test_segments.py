"""Joining turns: a whole earlier turn or nothing, and the first writer wins. What a row says of its parts."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchrl_moe.data.segments import first_writer_wins, num_segments, shared_prefix, worst_resume

NAN = float("nan")
IDS = st.lists(st.integers(0, 2), max_size=6)


def ids(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@given(IDS, IDS)
def test_a_shared_prefix_is_a_prefix(earlier: list[int], later: list[int]) -> None:
    assert shared_prefix(ids(earlier), ids(later)) == (len(earlier) if later[: len(earlier)] == earlier else 0)


def test_the_inputs_are_left_as_they_were() -> None:
    earlier, later = torch.tensor([5, -1]), torch.tensor([7, 8])
    first_writer_wins(earlier, later).fill_(0)
    assert earlier.tolist() == [5, -1] and later.tolist() == [7, 8]


@st.composite
def dialogues(draw: st.DrawFn) -> list[list[int]]:
    """Values of every token that each turn knows of, -1 where it knows none; turns only grow."""
    lengths = sorted(draw(st.lists(st.integers(0, 8), min_size=1, max_size=5)))
    return [draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n)) for n in lengths]


def first_known(turns: list[list[int]]) -> list[int]:
    """The reference, token by token."""
    return [next((turn[t] for turn in turns if t < len(turn) and turn[t] != -1), -1) for t in range(len(turns[-1]))]


@given(dialogues())
def test_each_token_has_what_its_first_writer_wrote(turns: list[list[int]]) -> None:
    """Ids; numbers, to which NaN is what unset is to ids; and routes, row by row."""
    first = first_known(turns)
    joined = reduce(first_writer_wins, [ids(turn) for turn in turns])
    assert joined.tolist() == first and joined.dtype == torch.int64
    numbers = [torch.tensor([NAN if v == -1 else float(v) for v in turn]) for turn in turns]
    assert [-1 if math.isnan(v) else int(v) for v in reduce(first_writer_wins, numbers).tolist()] == first
    routes = [torch.tensor([[[-1] * 2, [v, v]] for v in turn], dtype=torch.int8).view(-1, 2, 2) for turn in turns]
    joined = reduce(first_writer_wins, routes)
    assert joined.dtype == torch.int8 and joined.tolist() == [[[-1] * 2, [v, v]] for v in first]


# -- what a row says of its parts -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("versions", "parts"),
    [([-1, 2, 2], 1), ([-1, 0, 0, 1], 2), ([-1, 2, 3, 3, 5], 3), ([-1, -1], 0), ([2, -1, -1, 2, 3], 2), ([], 0)],
)
def test_parts_are_counted_where_the_weights_changed(versions: list[int], parts: int) -> None:
    assert num_segments(torch.tensor(versions, dtype=torch.int32)) == parts


@pytest.mark.parametrize(
    ("hows", "worst"),
    [
        (["none"], "none"), (["none", "forced"], "forced"), (["forced", "none", "forced"], "forced"),
        (["live", "forced"], "live"), (["none", "live", "none"], "live"),
    ],
)  # fmt: skip
def test_the_worst_way_of_reading_again_counts(hows: list[str], worst: str) -> None:
    assert worst_resume(*hows) == worst
    with pytest.raises(ValueError):
        worst_resume(*hows, "Live")
