"""Strategies, each by itself: least loaded, round-robin, power of two, KV cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from torchrl_moe.modules.serving.candidates import Candidates, ReplicaState
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.strategies import (
    KVCache,
    LeastRequests,
    PowerOfTwo,
    RoundRobin,
    RoutingContext,
    Strategy,
)

CONTEXT = RoutingContext()


def table_of(*inflight: int) -> ReplicaTable:
    table = ReplicaTable(range(len(inflight)), ReplicaState.SERVING)
    for entry, count in zip(table, inflight, strict=True):
        entry.inflight = count
    return table


def choices(strategy: Strategy, table: ReplicaTable, allowed: Sequence[Sequence[int]], hold: bool = False) -> list[int]:
    """Choose among each of ``allowed`` in turn; unless ``hold``, a request is over before the next one comes."""
    chosen = []
    for indices in allowed:
        index = strategy.choose(Candidates(table[i] for i in indices), CONTEXT)
        assert index is not None
        table.reserve(index)
        if not hold:
            table.give_back(index)
        chosen.append(index)
    return chosen


def test_the_least_loaded_is_chosen_wherever_it_stands() -> None:
    table = table_of(3, 1, 2)
    assert LeastRequests().choose(Candidates(table), CONTEXT) == 1
    assert LeastRequests().choose(Candidates(list(table)[::-1]), CONTEXT) == 1
    assert LeastRequests().choose(Candidates([table[0], table[2]]), CONTEXT) == 2


def test_held_requests_level_the_load() -> None:
    # 3,1,2 -> fill 1, then 1 and 2 (1 was chosen last), then all are at 3 and take turns
    assert choices(LeastRequests(), table_of(3, 1, 2), [[0, 1, 2]] * 6, hold=True) == [1, 2, 1, 0, 2, 1]


def test_200_short_requests_fan_out_evenly_over_4_idle_replicas() -> None:
    chosen = choices(LeastRequests(), table_of(0, 0, 0, 0), [range(4)] * 200)
    assert Counter(chosen) == {0: 50, 1: 50, 2: 50, 3: 50}
    assert chosen[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_tie_goes_to_the_least_recently_chosen_while_candidates_come_and_go() -> None:
    every, without_0, without_1 = [0, 1, 2], [1, 2], [0, 2]
    allowed = [every, every, without_0, without_0, without_1, every, every, every, without_1, every]
    # last chosen:      0      1        2          1          0      2      1      0      2      1
    assert choices(LeastRequests(), table_of(0, 0, 0), allowed) == [0, 1, 2, 1, 0, 2, 1, 0, 2, 1]


def test_a_replica_that_was_away_is_not_flooded_on_return() -> None:
    table = table_of(0, 0)
    assert choices(LeastRequests(), table, [[1]] * 5) == [1] * 5
    assert choices(LeastRequests(), table, [[0, 1]] * 6) == [0, 1, 0, 1, 0, 1]


def test_round_robin_takes_turns_by_index_and_ignores_load() -> None:
    assert choices(RoundRobin(), table_of(9, 0, 0), [[0, 1, 2]] * 7) == [0, 1, 2, 0, 1, 2, 0]
    assert choices(RoundRobin(), table_of(0, 0, 0), [[2, 0, 1]] * 4) == [0, 1, 2, 0]


def test_round_robin_skips_a_replica_that_is_away_and_keeps_its_turn() -> None:
    allowed = [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1]]
    # turn:        0             1          3          4 -> 0      1             2          3 -> 1
    assert choices(RoundRobin(), table_of(0, 0, 0, 0), allowed) == [0, 2, 3, 0, 1, 2, 1]


# -- power of two -----------------------------------------------------------------------------------------------------


def test_of_two_drawn_the_less_loaded_is_taken_and_never_the_most_loaded_of_all() -> None:
    strategy = PowerOfTwo(random.Random(0))
    chosen = Counter(choices(strategy, table_of(0, 1, 2, 9), [range(4)] * 600))
    # of the six pairs, three hold replica 0, two more have 1 as the lesser, one has 2
    assert chosen.keys() == {0, 1, 2}
    assert chosen[0] == pytest.approx(300, abs=40)
    assert chosen[1] == pytest.approx(200, abs=40)


def test_of_two_replicas_both_are_drawn() -> None:
    assert choices(PowerOfTwo(random.Random(0)), table_of(5, 0), [range(2)] * 20) == [1] * 20


def test_the_same_random_numbers_give_the_same_choices() -> None:
    once, again = (choices(PowerOfTwo(random.Random(3)), table_of(*[0] * 20), [range(20)] * 50) for _ in range(2))
    assert once == again


# -- KV cache ---------------------------------------------------------------------------------------------------------


def usage_of(table: ReplicaTable, at: float, *shares: float | None) -> None:
    for index, share in enumerate(shares):
        if share is not None:
            table.observe(index, at, cache_usage=share)


def kv(now: float = 0.0) -> KVCache:
    return KVCache(clock=lambda: now)


def test_the_emptiest_cache_is_chosen_and_not_the_fewest_requests() -> None:
    table = table_of(5, 1, 9)
    usage_of(table, 0.0, 0.5, 0.9, 0.2)
    assert choices(kv(), table, [range(3)]) == [2]


def test_equal_caches_go_by_load() -> None:
    table = table_of(5, 1, 9)
    usage_of(table, 0.0, 0.0, 0.0, 0.0)
    assert choices(kv(), table, [range(3)]) == [1]


def test_stats_move_on_with_the_requests_so_that_none_is_piled_upon() -> None:
    table = table_of(10, 10)
    usage_of(table, 0.0, 0.4, 0.6)  # 0.05 a request: level after 4 more on the first, then in turn
    assert choices(kv(), table, [range(2)] * 8, hold=True) == [0] * 4 + [1, 0, 1, 0]


def test_a_replica_without_figures_is_estimated_by_its_requests() -> None:
    table = table_of(10, 10, 2)
    usage_of(table, 0.0, 0.4, 0.6, None)  # 2 requests at 0.05
    assert choices(kv(), table, [range(3)]) == [2]
    assert choices(kv(), table, [range(2)]) == [0]


def test_stale_stats_are_none() -> None:
    table = table_of(5, 1)
    assert kv().choose(Candidates(table), CONTEXT) is None
    usage_of(table, 10.0, 0.1, 0.9)
    assert kv(15.0).choose(Candidates(table), CONTEXT) == 0
    assert kv(15.1).choose(Candidates(table), CONTEXT) is None
    table.observe(1, 14.0, cache_usage=0.9)
    assert kv(15.1).choose(Candidates(table), CONTEXT) == 1  # 0.9 known; the other has five times its requests


def test_a_context_is_empty_by_default() -> None:
    assert (CONTEXT.prompt, CONTEXT.session_id, dict(CONTEXT.request_context)) == (None, None, {})
