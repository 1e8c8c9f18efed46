"""The roster: states change by the table, load is counted, names are used once at a time, listeners hear of changes."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import pytest

from support.services import listening
from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.candidates import CacheUsage, Recovery
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.roster import Roster
from torchrl_moe.modules.serving.states import ReplicaState


def test_replicas_start_out_as_told() -> None:
    replicas = [object(), object()]
    roster = Roster(replicas)
    assert len(roster) == 2
    assert [(e.index, e.replica, e.state, e.version, e.inflight) for e in roster] == [
        (0, replicas[0], ReplicaState.STARTING, 0, 0),
        (1, replicas[1], ReplicaState.STARTING, 0, 0),
    ]
    assert [e.state for e in Roster("ab", ReplicaState.SERVING)] == [ReplicaState.SERVING] * 2


@pytest.mark.parametrize("index", [-1, 2, 99])
def test_an_index_out_of_range_is_named_with_the_range(index: int) -> None:
    roster = Roster("ab")
    with pytest.raises(IndexError, match=rf"actor index {index} out of range \[0, 2\)"):
        roster[index]
    with pytest.raises(IndexError, match="out of range"):
        roster.set_state(index, ReplicaState.SERVING)


def test_a_state_follows_the_table_and_a_refusal_changes_nothing() -> None:
    roster = Roster("ab")
    roster.set_state(1, ReplicaState.SERVING)
    with pytest.raises(ValueError, match="SERVING cannot become STARTING"):
        roster.set_state(1, ReplicaState.STARTING)
    assert [e.state for e in roster] == [ReplicaState.STARTING, ReplicaState.SERVING]


def test_a_death_may_be_found_twice() -> None:
    roster = Roster("a")
    roster.mark_dead(0)
    roster.mark_dead(0)
    assert roster[0].state is ReplicaState.DEAD


def test_requests_are_counted_and_the_last_choice_is_remembered() -> None:
    roster = Roster("abc", ReplicaState.SERVING)
    for index in (2, 0, 2):
        roster.reserve(index)
    assert [e.inflight for e in roster] == [1, 0, 2]
    assert [e.chosen for e in roster] == [1, -1, 2]
    roster.give_back(2)
    assert [e.inflight for e in roster] == [1, 0, 1]


def test_only_those_that_serve_a_version_in_range_are_candidates() -> None:
    roster = Roster("abcde", ReplicaState.SERVING)
    for index, version in enumerate((3, 5, 4, 5, 9)):
        roster.set_version(index, version)
    roster.set_state(4, ReplicaState.DRAINING)
    with roster.changed:
        found = {
            (oldest, newest): [entry.index for entry in roster.serving(oldest, newest)]
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
        assert roster.newest_version == 5
        assert roster.serving() is roster.serving(3)  # the same question
    roster.set_state(4, ReplicaState.SERVING)
    with roster.changed:
        assert [entry.index for entry in roster.serving(6)] == [4]


def test_a_figure_that_a_replica_sent_holds_until_its_next_and_counts_the_requests_of_its_time() -> None:
    replicas = [SimpleNamespace(last_stats=None) for _ in range(2)]
    roster = Roster([*replicas, "no figures at all"], ReplicaState.SERVING)
    with roster.lock:
        roster.read_figures()
        assert [entry.usage for entry in roster] == [None, None, None]
        roster.reserve(0)
        replicas[0].last_stats = ReplicaStats(cache_usage=0.25)
        roster.read_figures()
        roster.reserve(0)
        roster.read_figures()  # nothing new
        assert roster[0].usage == CacheUsage(0.25, math.inf, 1)
        replicas[0].last_stats = ReplicaStats(cache_usage=1.0000001)
        roster.read_figures()
        assert roster[0].usage == CacheUsage(1.0, math.inf, 2)
        roster.observe(0, at=5.0, cache_usage=0.5)  # from elsewhere
        roster.read_figures()
        assert roster[0].usage == CacheUsage(0.5, 5.0, 2)
        roster.mark_dead(0)
        roster.read_figures()
        assert roster[0].usage is None


def test_candidates_are_told_of_every_change_of_load() -> None:
    roster = Roster("abc", ReplicaState.SERVING)
    roster.set_version(2, 1)
    with roster.changed:
        every, newer = roster.serving(), roster.serving(1)
        roster.reserve(2)
        roster.reserve(0)
        roster.observe(1, at=0.0, pending=7)
        assert (every.total, newer.total) == (9, 1)
        assert (every.least_loaded().index, newer.least_loaded().index) == (2, 2)
        roster.expire(before=1.0)
        roster.give_back(2)
        assert (every.total, newer.total) == (1, 0)
        roster.touch(1)
        assert every.least_loaded().index == 2


def test_a_lost_cache_has_another_number() -> None:
    roster = Roster("ab", ReplicaState.SERVING)
    seen = {entry.cache for entry in roster}
    assert len(seen) == 2

    def lost() -> bool:
        new = roster[1].cache not in seen
        seen.add(roster[1].cache)
        return new

    roster.set_state(1, ReplicaState.DRAINING)
    assert not lost()
    roster.set_version(1, 0)  # loaded anew, whatever it is called
    assert lost()
    roster.forget_prefixes(1)
    assert lost()
    roster.mark_dead(1)
    assert lost()
    roster.set_state(1, ReplicaState.STARTING)
    assert lost()
    assert roster[0].cache == 0


def test_counting_from_many_threads_loses_nothing() -> None:
    roster = Roster("ab", ReplicaState.SERVING)

    def work() -> None:
        for i in range(500):
            with roster.changed:
                roster.reserve(i % 2)
            roster.give_back(i % 2)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e.inflight for e in roster] == [0, 0]


def test_whoever_waits_wakes_up_when_a_state_changes() -> None:
    roster = Roster("a")
    waiting = threading.Event()

    def serve() -> None:
        waiting.wait(60.0)
        roster.set_state(0, ReplicaState.SERVING)

    thread = threading.Thread(target=serve)
    thread.start()
    with roster.changed:
        waiting.set()
        assert roster.changed.wait_for(lambda: roster[0].state is ReplicaState.SERVING, 60.0)
    thread.join()


def test_a_listener_hears_changes_while_it_listens_and_no_longer() -> None:
    roster = Roster("ab")
    heard = []
    with listening(roster, lambda: heard.append([e.state.name for e in roster])):
        roster.set_state(0, ReplicaState.SERVING)
        with pytest.raises(ValueError, match="cannot become"):
            roster.set_state(0, ReplicaState.STARTING)
        roster.mark_dead(1)
        roster.mark_dead(1)
    roster.set_state(0, ReplicaState.SYNCING)
    assert heard == [["SERVING", "STARTING"], ["SERVING", "DEAD"]]


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_death_is_noted_once_and_not_of_another_replica_in_its_place() -> None:
    first, second = object(), object()
    roster = Roster([first])
    roster.set_state(0, ReplicaState.SERVING)
    roster.mark_dead(0, "out of memory", first)
    roster.mark_dead(0, "a consequence", first)
    assert (roster[0].state, roster[0].last_error) == (ReplicaState.DEAD, "out of memory")
    roster.replace(0, second)
    roster.mark_dead(0, "late news", first)
    assert (roster[0].state, roster[0].replica, roster[0].restarts) == (ReplicaState.STARTING, second, 1)


def test_a_new_replica_has_the_checkpoints_weights_and_an_empty_cache_and_the_roster_remembers_the_latest() -> None:
    roster = Roster(["a"])
    roster.set_state(0, ReplicaState.SERVING)
    roster.set_version(0, 3)
    cache = roster[0].cache
    roster.mark_dead(0)
    roster.replace(0, "b")
    assert (roster[0].version, roster.latest_version) == (0, 3)
    assert roster[0].cache != cache
    with pytest.raises(ValueError, match="STARTING cannot become STARTING"):
        roster.replace(0, "c")


def test_one_that_waits_for_an_update_is_the_supervisors_again_once_it_goes_on() -> None:
    roster = Roster("ab")
    for index, state in enumerate((ReplicaState.SERVING, ReplicaState.DEAD)):
        roster.set_recovery(index, Recovery.UPDATE)
        roster.set_state(index, state)
        assert roster[index].recovery is Recovery.SUPERVISOR


def failing(roster: Roster, index: int, times: int = 2) -> None:
    for _ in range(times):
        roster.fail(index, "bad")


def test_one_that_keeps_failing_takes_nothing_until_it_has_cooled_down() -> None:
    roster = Roster("ab", ReplicaState.SERVING, FaultPolicy(breaker_failures=2, breaker_cooldown=0.05))
    failing(roster, 0, 1)
    assert len(roster.serving()) == 2
    heard: list[int] = []
    with listening(roster, lambda: heard.append(len(roster.serving()))):
        failing(roster, 0, 1)
        assert [entry.index for entry in roster.serving()] == [1]
        time.sleep(0.06)
        roster.cool()
    assert (len(roster.serving()), heard) == (2, [1, 2])
    assert roster[0].last_error == "bad"


def test_trials_are_few_and_a_good_one_closes_the_breaker() -> None:
    faults = FaultPolicy(breaker_failures=1, breaker_cooldown=0.0, breaker_trials=2)
    roster = Roster("ab", ReplicaState.SERVING, faults)
    failing(roster, 0, 1)
    roster.cool()
    with roster.lock:
        assert [roster.reserve(0), roster.reserve(0), roster.reserve(1)] == [True, True, False]
        assert [entry.index for entry in roster.serving()] == [1]
    roster.give_back(0, True, None)  # says nothing, and makes room
    assert (len(roster.serving()), roster[0].breaker.state.name) == (2, "HALF_OPEN")
    roster.give_back(0, True, True)
    assert roster[0].breaker.state.name == "CLOSED"
    assert roster[0].inflight == 0


def test_of_bad_replicas_only_the_first_that_would_leave_nobody_is_tried_at_once() -> None:
    roster = Roster("ab", ReplicaState.SERVING, FaultPolicy(breaker_failures=1, breaker_cooldown=3600.0))
    failing(roster, 0, 1)
    assert [entry.breaker.state.name for entry in roster] == ["OPEN", "CLOSED"]
    failing(roster, 1, 1)
    assert [entry.breaker.state.name for entry in roster] == ["HALF_OPEN", "HALF_OPEN"]


def test_a_bad_replica_is_tried_at_once_when_the_last_good_one_stops_serving() -> None:
    roster = Roster("ab", ReplicaState.SERVING, FaultPolicy(breaker_failures=1, breaker_cooldown=3600.0))
    failing(roster, 0, 1)
    roster.set_state(1, ReplicaState.SYNCING)
    assert [entry.index for entry in roster.serving()] == [0]


def test_doubts_are_told_to_listeners() -> None:
    roster = Roster("ab")
    heard: list[set[int]] = []
    with listening(roster, lambda: heard.append(set(roster.doubts))):
        roster.doubt(1)
    assert heard == [{1}]


def test_a_roster_prints_a_line_for_each_replica() -> None:
    roster = Roster("ab", ReplicaState.SERVING)
    roster.reserve(1)
    roster.set_version(1, 3)
    assert repr(roster) == "Roster(#0 SERVING v0 inflight=0, #1 SERVING v3 inflight=1)"
