"""The roster: states change by the table, load is counted, names are used once at a time, listeners hear of changes."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest

from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.candidates import CacheUsage
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
        waiting.wait(5.0)
        roster.set_state(0, ReplicaState.SERVING)

    thread = threading.Thread(target=serve)
    thread.start()
    with roster.changed:
        waiting.set()
        assert roster.changed.wait_for(lambda: roster[0].state is ReplicaState.SERVING, 5.0)
    thread.join()


def test_a_listener_hears_changes_while_it_listens_and_no_longer() -> None:
    roster = Roster("ab")
    heard = []
    with roster.listening(lambda: heard.append([e.state.name for e in roster])):
        roster.set_state(0, ReplicaState.SERVING)
        with pytest.raises(ValueError, match="cannot become"):
            roster.set_state(0, ReplicaState.STARTING)
        roster.mark_dead(1)
        roster.mark_dead(1)
    roster.set_state(0, ReplicaState.SYNCING)
    assert heard == [["SERVING", "STARTING"], ["SERVING", "DEAD"]]


def test_a_listener_is_let_go_when_its_user_fails() -> None:
    roster = Roster("a")
    heard: list[int] = []
    with pytest.raises(KeyError), roster.listening(lambda: heard.append(1)):
        raise KeyError
    roster.set_state(0, ReplicaState.SERVING)
    assert heard == []


def test_a_request_id_is_used_once_at_a_time() -> None:
    roster = Roster("a")
    roster.open_ids(["x", "y"])
    with pytest.raises(ValueError, match=r"request ids are in flight already: x, y\. Use an id once at a time"):
        roster.open_ids(["y", "z", "x"])
    roster.open_ids(["z"])  # the refused call took nothing
    roster.close_ids(["x"])
    roster.close_ids(["x"])
    roster.open_ids(["x"])


def test_a_roster_prints_a_line_for_each_replica() -> None:
    roster = Roster("ab", ReplicaState.SERVING)
    roster.reserve(1)
    roster.set_version(1, 3)
    assert repr(roster) == "Roster(#0 SERVING v0 inflight=0, #1 SERVING v3 inflight=1)"
