"""Candidates: always the least loaded, ties to the least recently chosen, whatever was changed in between."""

from __future__ import annotations

import random

import pytest

from torchrl_moe.modules.serving.candidates import Candidates, ReplicaState, TableEntry, load_bound
from torchrl_moe.modules.serving.replica_table import ReplicaTable


def entries(*inflight: int) -> list[TableEntry]:
    return [TableEntry(i, None, inflight=count, cache=100 + i) for i, count in enumerate(inflight)]


def test_candidates_are_a_sequence_that_can_be_asked_by_index_and_cache() -> None:
    made = entries(3, 1, 2)
    candidates = Candidates(made[1:])
    assert (len(candidates), list(candidates), candidates[-1]) == (2, made[1:], made[2])
    assert (candidates.find(1), candidates.find(0)) == (made[1], None)
    assert (candidates.with_cache(102), candidates.with_cache(100)) == (made[2], None)
    assert candidates.total == 3
    assert len(Candidates([])) == 0


def test_load_is_what_was_counted_here_or_a_larger_report() -> None:
    entry = TableEntry(0, None, inflight=2)
    assert entry.load == 2
    entry.polled = 1
    assert entry.load == 2
    entry.polled = 5
    assert entry.load == 5


def test_the_least_loaded_is_found_with_ties_to_the_one_chosen_longest_ago() -> None:
    made = entries(1, 0, 0)
    made[1].chosen = 7
    candidates = Candidates(made)
    assert candidates.least_loaded() is made[2]
    assert candidates.least_loaded() is made[2]  # asking changes nothing


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_kept_through_any_changes(seed: int) -> None:
    rng = random.Random(seed)
    table = ReplicaTable(range(7), ReplicaState.SERVING)
    held: list[int] = []
    for step in range(2000):
        with table.changed:
            candidates = table.serving()
            serving = [entry for entry in table if entry.state is ReplicaState.SERVING]
            assert candidates.total == sum(entry.load for entry in serving)
            best = min(serving, key=lambda entry: (entry.load, entry.chosen, entry.index))
            if step % 3:  # not at every step: changes add up between two questions
                assert candidates.least_loaded() is best
            what = rng.random()
            if what < 0.5:
                index = rng.choice(serving).index
                table.reserve(index)
                held.append(index)
            elif what < 0.9 and held:
                table.give_back(held.pop(rng.randrange(len(held))))
            elif what < 0.93:
                table.observe(rng.randrange(7), at=float(step), pending=rng.randrange(20))
            elif what < 0.96:
                table.expire(before=float(step - 50))
            elif best.index != 0:
                table.set_state(best.index, ReplicaState.DRAINING)
                table.set_state(best.index, ReplicaState.SERVING)


def test_the_bound_is_a_multiple_of_the_mean_and_never_below_the_margin() -> None:
    busy = Candidates(entries(39, 40, 40))  # mean 40 with the new one
    assert load_bound(busy, 1.15, 1.0) == pytest.approx(46.0)
    assert load_bound(busy, 1.0, 2.0) == pytest.approx(42.0)
    idle = Candidates(entries(0, 0, 0, 0))
    assert load_bound(idle, 1.15, 1.0) == pytest.approx(1.25)


def test_an_entry_takes_requests_if_it_serves_and_its_breaker_lets_them_pass() -> None:
    entry = TableEntry(0, "a", ReplicaState.SERVING)
    assert entry.may_take
    entry.breaker.failed(trip=True)
    assert not entry.may_take
    entry.breaker.try_now()
    assert entry.may_take
    entry.state = ReplicaState.DRAINING
    assert not entry.may_take
