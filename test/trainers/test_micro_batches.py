"""Parts by tokens: none too large but for a sample that is too large by itself, and none lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_moe.trainers.learner import micro_batches, micro_batches_of_ranks
from torchrl_moe.trainers.ranks import Ranks


def test_without_a_limit_all_is_one_part() -> None:
    assert micro_batches([3, 9, 4], None) == [[0, 1, 2]]
    assert micro_batches([], None) == [] == micro_batches([], 5)


def test_a_sample_that_is_too_long_is_a_part_of_its_own() -> None:
    assert micro_batches([2, 50, 2], 4) == [[1], [0, 2]]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_each_sample_is_in_one_part_and_no_part_of_several_is_too_large(lengths: list[int], limit: int) -> None:
    parts = micro_batches(lengths, limit)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= limit


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        micro_batches([1], 0)


@pytest.mark.parametrize(
    ("at_least", "parts"),
    [
        (2, [[1, 3], [0, 2]]),
        (3, [[1], [3], [0, 2]]),
        (4, [[1], [3], [0], [2]]),
        (6, [[1], [3], [0], [2], [], []]),
    ],
)
def test_more_parts_than_memory_needs(at_least: int, parts: list[list[int]]) -> None:
    assert micro_batches([5, 9, 4, 8], 18, at_least) == parts


def test_no_samples_are_empty_parts() -> None:
    assert micro_batches([], None, 2) == micro_batches([], 4, 2) == [[], []]


class Others(Ranks):
    """Ranks that have three parts each."""

    def gather(self, value: Any) -> list[Any]:
        return [value, 3]


def test_ranks_have_as_many_parts_as_the_one_that_has_most() -> None:
    assert micro_batches_of_ranks([5, 9, 4, 8], 18, Others()) == [[1], [3], [0, 2]]
    assert micro_batches_of_ranks([9], 18, Others()) == [[0], [], []]
    assert len(micro_batches_of_ranks([9, 9, 9, 9], 9, Others())) == 4
    assert micro_batches_of_ranks([5, 9, 4, 8], 18, Ranks()) == micro_batches([5, 9, 4, 8], 18)
