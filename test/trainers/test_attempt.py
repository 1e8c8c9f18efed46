"""Ranks that were started together find a name that older ones never had. Ranks are threads here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from torchrl_moe.errors import RankError
from torchrl_moe.trainers.ranks import attempt_of


def attempts(store: HashStore, ranks: list[int], seconds: float = 60.0) -> list[str]:
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda rank: attempt_of(store, rank, 3, seconds), ranks))


def test_ranks_share_a_name_that_no_older_ones_had() -> None:
    store = HashStore()
    found = [attempts(store, ranks) for ranks in ([0, 1, 2], [2, 1, 0], [1, 0, 2])]
    assert all(len(set(names)) == 1 for names in found)
    assert len({names[0] for names in found}) == 3


def test_what_half_an_attempt_has_left_is_no_answer() -> None:
    """Rank 1 had asked when its attempt ended, and rank 0 had not come."""
    store = HashStore()
    store.set("asks/1", "of old")
    first, second, third = attempts(store, [0, 1, 2])
    assert first == second == third


@pytest.mark.parametrize(("there", "missing"), [([0], r"rank\(s\) 1, 2 did"), ([1, 2], "rank 0 did")])
def test_a_rank_that_does_not_come_is_named(there: list[int], missing: str) -> None:
    with pytest.raises(RankError, match=missing):
        attempts(HashStore(), there, 0.2)
