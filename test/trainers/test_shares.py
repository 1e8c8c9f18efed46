"""Ranks get whole groups, about as many tokens each, and all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from torchrl_moe.trainers.ranks import balanced, shares


def spread(loads: list[int], parts: list[list[int]]) -> float:
    """How much more than the mean the heaviest part has."""
    sums = [sum(loads[i] for i in part) for part in parts]
    return max(sums) * len(parts) / sum(sums) - 1


@pytest.mark.parametrize("ranks", [2, 3, 8, 32, 64])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("group_size", [8, 16])
def test_eight_groups_for_each_rank_are_within_five_percent(ranks: int, sigma: float, group_size: int) -> None:
    """Lengths are log-normal, cut at 16384 tokens, as generated answers are."""
    for seed in range(3):
        draw = np.random.default_rng([ranks, int(2 * sigma), group_size, seed])
        lengths = np.clip(draw.lognormal(6.0, sigma, (8 * ranks, group_size)), 1, 16384).astype(int)
        loads = lengths.sum(-1).tolist()
        parts = balanced(loads, ranks)
        # nothing makes a share lighter than its heaviest group
        assert spread(loads, parts) <= max(0.05, max(loads) * ranks / sum(loads) - 1)


@settings(max_examples=60)
@given(st.data())
def test_every_item_is_in_one_part_and_no_part_is_too_small(data: st.DataObject) -> None:
    count, at_least = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    loads = data.draw(st.lists(st.integers(0, 1 << 20), min_size=count * at_least, max_size=60))
    parts = balanced(loads, count, at_least)
    assert sorted(itertools.chain(*parts)) == list(range(len(loads)))
    assert len(parts) == count and min(map(len, parts)) >= at_least
    assert all(part == sorted(part) for part in parts)
    if at_least == 1:  # what greedy assignment guarantees at worst, and this method, too
        mean = sum(loads) / count
        assert max(sum(loads[i] for i in part) for part in parts) <= mean + max(loads)


def test_the_best_of_all_partitions_where_there_are_few() -> None:
    loads = [9, 7, 6, 5, 5, 4]
    best = min(
        max(sum(pick), sum(loads) - sum(pick)) for size in range(7) for pick in itertools.combinations(loads, size)
    )
    assert max(sum(loads[i] for i in part) for part in balanced(loads, 2)) == best == 18


def test_too_few_items_are_refused() -> None:
    with pytest.raises(ValueError, match="5 items are too few for 3 parts of at least 2"):
        balanced([1] * 5, 3, 2)


def test_a_group_stays_whole_and_its_rows_in_order() -> None:
    lengths = {3: [4, 1, 2], 9: [5], 4: [2, 2, 9], 7: [1]}
    rows = [
        TensorDict({"group_id": torch.tensor(group), "tokens": {"full": torch.arange(length)}, "place": i})
        for i, (group, length) in enumerate((g, n) for g, several in lengths.items() for n in several)
    ]
    found = shares(lazy_stack(rows), 2)
    # 26 tokens: 13 of group 4, and 7 + 5 + 1 of the others
    assert sorted([int(row["group_id"]) for row in share.unbind(0)] for share in found) == [
        [3, 3, 3, 9, 7],
        [4, 4, 4],
    ]
    assert [[row["place"] for row in share.unbind(0)] for share in found if len(share) == 5] == [[0, 1, 2, 3, 7]]
