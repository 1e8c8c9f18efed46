"""The replica table: states, counted load, names used once at a time, listeners that hear of changes."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import pytest

from support.services import listening
from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.candidates import CacheUsage, FaultPolicy, Recovery, ReplicaState
from torchrl_moe.modules.serving.replica_table import ReplicaTable


def test_replicas_start_out_as_told() -> None:
    replicas = [object(), object()]
    table = ReplicaTable(replicas)
    assert len(table) == 2
    assert [(e.index, e.replica, e.state, e.version, e.inflight) for e in table] == [
        (0, replicas[0], ReplicaState.STARTING, 0, 0),
        (1, replicas[1], ReplicaState.STARTING, 0, 0),
    ]
    assert [e.state for e in ReplicaTable("ab", ReplicaState.SERVING)] == [ReplicaState.SERVING] * 2


@pytest.mark.parametrize("index", [-1, 2, 99])
def test_an_index_out_of_range_is_named_with_the_range(index: int) -> None:
    table = ReplicaTable("ab")
    with pytest.raises(IndexError, match=rf"actor index {index} out of range \[0, 2\)"):
        table[index]
    with pytest.raises(IndexError, match="out of range"):
        table.set_state(index, ReplicaState.SERVING)


def test_a_state_follows_the_table_and_a_refusal_changes_nothing() -> None:
    table = ReplicaTable("ab")
    table.set_state(1, ReplicaState.SERVING)
    with pytest.raises(ValueError, match="SERVING cannot become STARTING"):
        table.set_state(1, ReplicaState.STARTING)
    assert [e.state for e in table] == [ReplicaState.STARTING, ReplicaState.SERVING]


def test_a_death_may_be_found_twice() -> None:
    table = ReplicaTable("a")
    table.mark_dead(0)
    table.mark_dead(0)
    assert table[0].state is ReplicaState.DEAD


def test_requests_are_counted_and_the_last_choice_is_remembered() -> None:
    table = ReplicaTable("abc", ReplicaState.SERVING)
    for index in (2, 0, 2):
        table.reserve(index)
    assert [e.inflight for e in table] == [1, 0, 2]
    assert [e.chosen for e in table] == [1, -1, 2]
    table.give_back(2)
    assert [e.inflight for e in table] == [1, 0, 1]


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


def test_candidates_are_notified_of_every_change_of_load() -> None:
    table = ReplicaTable("abc", ReplicaState.SERVING)
    table.set_version(2, 1)
    with table.changed:
        every, newer = table.serving(), table.serving(1)
        table.reserve(2)
        table.reserve(0)
        table.observe(1, at=0.0, pending=7)
        assert (every.total, newer.total) == (9, 1)
        assert (every.least_loaded().index, newer.least_loaded().index) == (2, 2)
        table.expire(before=1.0)
        table.give_back(2)
        assert (every.total, newer.total) == (1, 0)
        table.touch(1)
        assert every.least_loaded().index == 2


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
    table.set_state(1, ReplicaState.STARTING)
    assert lost()
    assert table[0].cache == 0


def test_counting_from_many_threads_loses_nothing() -> None:
    table = ReplicaTable("ab", ReplicaState.SERVING)

    def work() -> None:
        for i in range(500):
            with table.changed:
                table.reserve(i % 2)
            table.give_back(i % 2)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e.inflight for e in table] == [0, 0]


def test_every_waiting_thread_wakes_up_when_a_state_changes() -> None:
    table = ReplicaTable("a")
    waiting = threading.Event()

    def serve() -> None:
        waiting.wait(60.0)
        table.set_state(0, ReplicaState.SERVING)

    thread = threading.Thread(target=serve)
    thread.start()
    with table.changed:
        waiting.set()
        assert table.changed.wait_for(lambda: table[0].state is ReplicaState.SERVING, 60.0)
    thread.join()


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


def test_a_new_replica_has_the_checkpoints_weights_and_an_empty_cache_and_the_table_remembers_the_latest() -> None:
    table = ReplicaTable(["a"])
    table.set_state(0, ReplicaState.SERVING)
    table.set_version(0, 3)
    cache = table[0].cache
    table.mark_dead(0)
    table.replace(0, "b")
    assert (table[0].version, table.latest_version) == (0, 3)
    assert table[0].cache != cache
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


def test_trials_are_few_and_a_good_one_closes_the_breaker() -> None:
    faults = FaultPolicy(breaker_failures=1, breaker_cooldown=0.0, breaker_trials=2)
    table = ReplicaTable("ab", ReplicaState.SERVING, faults)
    failing(table, 0, 1)
    table.cool()
    with table.lock:
        assert [table.reserve(0), table.reserve(0), table.reserve(1)] == [True, True, False]
        assert [entry.index for entry in table.serving()] == [1]
    table.give_back(0, True, None)  # says nothing, and makes room
    assert (len(table.serving()), table[0].breaker.state.name) == (2, "HALF_OPEN")
    table.give_back(0, True, True)
    assert table[0].breaker.state.name == "CLOSED"
    assert table[0].inflight == 0


def test_of_bad_replicas_only_the_first_that_would_leave_nobody_is_tried_at_once() -> None:
    table = ReplicaTable("ab", ReplicaState.SERVING, FaultPolicy(breaker_failures=1, breaker_cooldown=3600.0))
    failing(table, 0, 1)
    assert [entry.breaker.state.name for entry in table] == ["OPEN", "CLOSED"]
    failing(table, 1, 1)
    assert [entry.breaker.state.name for entry in table] == ["HALF_OPEN", "HALF_OPEN"]


def test_a_bad_replica_is_tried_at_once_when_the_last_good_one_stops_serving() -> None:
    table = ReplicaTable("ab", ReplicaState.SERVING, FaultPolicy(breaker_failures=1, breaker_cooldown=3600.0))
    failing(table, 0, 1)
    table.set_state(1, ReplicaState.SYNCING)
    assert [entry.index for entry in table.serving()] == [0]


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


def test_a_table_prints_a_line_for_each_replica() -> None:
    table = ReplicaTable("ab", ReplicaState.SERVING)
    table.reserve(1)
    table.set_version(1, 3)
    assert repr(table) == "ReplicaTable(#0 SERVING v0 inflight=0, #1 SERVING v3 inflight=1)"


def test_of_many_replicas_a_table_prints_the_counts_and_the_first_few() -> None:
    table = ReplicaTable(range(1024), ReplicaState.SERVING)
    for index in (1, 2, 1000):
        table.mark_dead(index)
    lines = ", ".join(f"#{index} {'DEAD' if index in (1, 2) else 'SERVING'} v0 inflight=0" for index in range(8))
    assert repr(table) == f"ReplicaTable(1021 SERVING, 3 DEAD: {lines} and 1016 more)"
