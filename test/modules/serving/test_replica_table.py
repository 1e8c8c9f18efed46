"""The replica table: states, load that is counted, candidates by load, breakers, listeners."""

from __future__ import annotations

import math
import random
import time
from types import SimpleNamespace

import pytest

from support.clock import Clock
from support.services import listening
from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.candidates import (
    Breaker,
    BreakerState,
    CacheUsage,
    Candidates,
    FaultPolicy,
    Recovery,
    ReplicaState,
    TableEntry,
    check_transition,
    load_bound,
)
from torchrl_moe.modules.serving.replica_table import ReplicaTable


def test_an_index_out_of_range_is_named_with_the_range() -> None:
    table = ReplicaTable("ab")
    for index in (-1, 2, 99):
        for use in (table.__getitem__, lambda one: table.set_state(one, ReplicaState.SERVING)):
            with pytest.raises(IndexError, match=rf"actor index {index} out of range \[0, 2\)"):
                use(index)


def test_only_those_that_serve_a_version_in_range_are_candidates() -> None:
    table = ReplicaTable("abcde", ReplicaState.SERVING)
    for index, version in enumerate((3, 5, 4, 5, 9)):
        table.set_version(index, version)
    table.set_state(4, ReplicaState.DRAINING)
    with table.changed:
        found = {
            (oldest, newest): [entry.index for entry in table.serving(oldest, newest)]
            for oldest, newest in [(None, None), (4, None), (None, 4), (5, 5), (6, None), (None, 2), (0, 100)]
        }
        assert found == {
            (None, None): [0, 1, 2, 3],
            (4, None): [1, 2, 3],
            (None, 4): [0, 2],
            (5, 5): [1, 3],
            (6, None): [],
            (None, 2): [],
            (0, 100): [0, 1, 2, 3],
        }
        assert table.newest_version == 5
        assert table.serving() is table.serving(3)  # the same question
    table.set_state(4, ReplicaState.SERVING)
    with table.changed:
        assert [entry.index for entry in table.serving(6)] == [4]


def test_a_figure_that_a_replica_sent_holds_until_its_next_and_counts_the_requests_of_its_time() -> None:
    replicas = [SimpleNamespace(last_stats=None) for _ in range(2)]
    table = ReplicaTable([*replicas, "no stats at all"], ReplicaState.SERVING)
    with table.lock:
        table.read_stats()
        assert [entry.usage for entry in table] == [None, None, None]
        table.reserve(0)
        replicas[0].last_stats = ReplicaStats(cache_usage=0.25)
        table.read_stats()
        table.reserve(0)
        table.read_stats()  # nothing new
        assert table[0].usage == CacheUsage(0.25, math.inf, 1)
        replicas[0].last_stats = ReplicaStats(cache_usage=1.0000001)
        table.read_stats()
        assert table[0].usage == CacheUsage(1.0, math.inf, 2)
        table.observe(0, at=5.0, cache_usage=0.5)  # from elsewhere
        table.read_stats()
        assert table[0].usage == CacheUsage(0.5, 5.0, 2)
        table.mark_dead(0)
        table.read_stats()
        assert table[0].usage is None


def test_a_lost_cache_has_another_number() -> None:
    table = ReplicaTable("ab", ReplicaState.SERVING)
    seen = {entry.cache for entry in table}
    assert len(seen) == 2

    def lost() -> bool:
        new = table[1].cache not in seen
        seen.add(table[1].cache)
        return new

    table.set_state(1, ReplicaState.DRAINING)
    assert not lost()
    table.set_version(1, 0)  # loaded again, whatever its number
    assert lost()
    table.forget_prefixes(1)
    assert lost()
    table.mark_dead(1)
    assert lost()
    table.replace(1, "c")
    assert lost()
    assert table[0].cache == 0


def test_a_listener_hears_changes_while_it_listens_and_no_longer() -> None:
    table = ReplicaTable("ab")
    heard = []
    with listening(table, lambda: heard.append([e.state.name for e in table])):
        table.set_state(0, ReplicaState.SERVING)
        with pytest.raises(ValueError, match="cannot become"):
            table.set_state(0, ReplicaState.STARTING)
        table.mark_dead(1)
        table.mark_dead(1)
    table.set_state(0, ReplicaState.SYNCING)
    assert heard == [["SERVING", "STARTING"], ["SERVING", "DEAD"]]


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_death_is_noted_once_and_not_of_another_replica_in_its_place() -> None:
    first, second = object(), object()
    table = ReplicaTable([first])
    table.set_state(0, ReplicaState.SERVING)
    table.mark_dead(0, "out of memory", first)
    table.mark_dead(0, "a consequence", first)
    assert (table[0].state, table[0].last_error) == (ReplicaState.DEAD, "out of memory")
    table.replace(0, second)
    table.mark_dead(0, "late news", first)
    assert (table[0].state, table[0].replica, table[0].restarts) == (ReplicaState.STARTING, second, 1)


def test_a_new_replica_has_the_checkpoints_weights_and_the_table_remembers_the_latest() -> None:
    table = ReplicaTable(["a"])
    table.set_state(0, ReplicaState.SERVING)
    table.set_version(0, 3)
    table.mark_dead(0)
    table.replace(0, "b")
    assert (table[0].version, table.latest_version) == (0, 3)
    with pytest.raises(ValueError, match="STARTING cannot become STARTING"):
        table.replace(0, "c")


def test_one_that_waits_for_an_update_is_the_supervisors_again_once_it_continues() -> None:
    table = ReplicaTable("ab")
    for index, state in enumerate((ReplicaState.SERVING, ReplicaState.DEAD)):
        table.set_recovery(index, Recovery.UPDATE)
        table.set_state(index, state)
        assert table[index].recovery is Recovery.SUPERVISOR


def failing(table: ReplicaTable, index: int, times: int = 2) -> None:
    for _ in range(times):
        table.fail(index, "bad")


def test_one_that_keeps_failing_takes_nothing_until_it_has_cooled_down() -> None:
    table = ReplicaTable("ab", ReplicaState.SERVING, FaultPolicy(breaker_failures=2, breaker_cooldown=0.05))
    failing(table, 0, 1)
    assert len(table.serving()) == 2
    heard: list[int] = []
    with listening(table, lambda: heard.append(len(table.serving()))):
        failing(table, 0, 1)
        assert [entry.index for entry in table.serving()] == [1]
        time.sleep(0.06)
        table.cool()
    assert (len(table.serving()), heard) == (2, [1, 2])
    assert table[0].last_error == "bad"


def test_of_bad_replicas_only_the_first_that_would_leave_nobody_is_tried_at_once() -> None:
    table = ReplicaTable("ab", ReplicaState.SERVING, FaultPolicy(breaker_failures=1, breaker_cooldown=3600.0))
    failing(table, 0, 1)
    assert [entry.breaker.state.name for entry in table] == ["OPEN", "CLOSED"]
    failing(table, 1, 1)
    assert [entry.breaker.state.name for entry in table] == ["HALF_OPEN", "HALF_OPEN"]


def test_doubts_are_told_to_listeners_that_they_concern() -> None:
    table = ReplicaTable("ab")
    heard: list[set[int]] = []
    changes: list[int] = []
    table.add_listener(lambda: heard.append(set(table.doubts)), doubts=True)
    with listening(table, lambda: changes.append(1)):
        table.doubt(1)
        assert (heard, changes) == ([{1}], [])
        table.set_version(0, 1)
    assert (len(heard), changes) == (2, [1])


def test_of_many_replicas_a_table_prints_the_counts_and_the_first_few() -> None:
    table = ReplicaTable(range(1024), ReplicaState.SERVING)
    for index in (1, 2, 1000):
        table.mark_dead(index)
    lines = ", ".join(f"#{index} {'DEAD' if index in (1, 2) else 'SERVING'} v0 inflight=0" for index in range(8))
    assert repr(table) == f"ReplicaTable(1021 SERVING, 3 DEAD: {lines} and 1016 more)"
    assert repr(table[0].state) == "SERVING"


# -- which state may follow which: all pairs, written out again by hand ------------------------------------------------


# from (row) to (column): x may, . may not
TABLE = """
             STARTING  SERVING  DRAINING  SYNCING  QUARANTINED  DEAD
STARTING     .         x        .         .        x            x
SERVING      .         .        x         x        x            x
DRAINING     .         x        .         x        x            x
SYNCING      .         x        .         .        x            x
QUARANTINED  x         .        .         .        .            x
DEAD         x         .        .         .        .            .
"""


def test_only_the_drawn_transitions_are_allowed() -> None:
    header, *rows = (line.split() for line in TABLE.strip().splitlines())
    drawn = {(row[0], new): cell for row in rows for new, cell in zip(header, row[1:], strict=True)}
    names = {state.name for state in ReplicaState}
    assert drawn.keys() == {(old, new) for old in names for new in names}
    found = {}
    for old, new in drawn:
        try:
            check_transition(ReplicaState[old], ReplicaState[new])
            found[old, new] = "x"
        except ValueError as error:
            assert str(error).startswith(f"a replica that is {old} cannot become {new}; allowed: ")
            found[old, new] = "."
    assert found == drawn


# -- the breaker of one replica, with a clock set by hand --------------------------------------------------------------


POLICY = FaultPolicy(breaker_failures=3, breaker_window=10.0, breaker_cooldown=5.0, breaker_trials=2)


def breaker(*failures: float) -> tuple[Breaker, Clock]:
    """A breaker that failed at these times."""
    clock = Clock()
    made = Breaker(POLICY, clock)
    for clock.now in failures:
        made.failed()
    return made, clock


def half_open() -> tuple[Breaker, Clock]:
    made, clock = breaker(0.0, 0.0, 0.0)
    clock.now = 5.0
    made.cool()
    return made, clock


def test_failures_within_the_window_open_it() -> None:
    assert breaker()[0].state is BreakerState.CLOSED
    assert breaker(0.0, 1.0)[0].state is BreakerState.CLOSED
    assert breaker(0.0, 5.0, 10.0)[0].state is BreakerState.OPEN
    assert breaker(0.0, 5.0, 10.1)[0].state is BreakerState.CLOSED
    assert breaker(0.0, 5.0, 10.1, 14.9)[0].state is BreakerState.OPEN


def test_an_open_one_takes_nothing_until_it_has_cooled_down_and_then_a_few_at_a_time() -> None:
    made, clock = breaker(0.0, 0.0, 0.0)
    assert made.blocks
    clock.now = 4.9
    made.cool()
    assert made.blocks
    clock.now = 5.0
    made.cool()
    assert made.state is BreakerState.HALF_OPEN
    assert not made.blocks
    assert (made.take(), made.blocks) == (True, False)
    assert (made.take(), made.blocks) == (True, True)
    made.tried(None)
    assert not made.blocks


def test_a_good_trial_closes_it_and_forgets_the_failures() -> None:
    made, _ = half_open()
    made.take()
    made.tried(True)
    assert made.state is BreakerState.CLOSED
    assert made.take() is False
    made.failed()
    made.failed()
    assert made.state is BreakerState.CLOSED


def test_a_failure_opens_a_half_open_one_again_for_as_long() -> None:
    made, clock = half_open()
    made.take()
    made.failed()
    made.tried(False)
    clock.now = 9.9
    made.cool()
    assert made.state is BreakerState.OPEN
    clock.now = 10.0
    made.cool()
    assert made.state is BreakerState.HALF_OPEN
    assert (made.take(), made.take(), made.blocks) == (True, True, True)  # the earlier trial is over


@pytest.mark.parametrize("well", [True, False])
def test_a_trial_of_before_does_not_close_an_open_one(well: bool) -> None:
    made, _ = half_open()
    made.take()
    made.failed()
    made.tried(well)
    assert made.state is BreakerState.OPEN


# -- candidates --------------------------------------------------------------------------------------------------------


def entries(*inflight: int) -> list[TableEntry]:
    return [TableEntry(i, None, inflight=count, cache=100 + i) for i, count in enumerate(inflight)]


@pytest.mark.parametrize("seed", range(2))
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


def test_delays_stop_at_the_longest_however_many_there_were() -> None:
    assert FaultPolicy(first_delay=0.25, longest_delay=1.5).delay(10**6) == 1.5
    assert FaultPolicy(first_delay=0.0).delay(5) == 0.0
