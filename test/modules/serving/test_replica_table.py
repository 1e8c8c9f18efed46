"""The replica table: states, load that is counted, candidates by load, breakers, listeners."""

from __future__ import annotations

import contextlib
import math
import time
from types import SimpleNamespace

import pytest

from support.clock import Clock
from support.services import listening
from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.replica_table import (
    Breaker,
    BreakerState,
    CacheUsage,
    FaultPolicy,
    Recovery,
    ReplicaState,
    ReplicaTable,
)
from torchrl_moe.testing import FakeAsyncVLLM


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


def test_a_death_is_noted_once_and_not_of_another_replica_in_its_place() -> None:
    first, second = object(), object()
    table = ReplicaTable([first], ReplicaState.SERVING)
    table.set_version(0, 3)
    table.mark_dead(0, "out of memory", first)
    table.mark_dead(0, "a consequence", first)
    assert (table[0].state, table[0].last_error) == (ReplicaState.DEAD, "out of memory")
    table.replace(0, second)
    table.mark_dead(0, "late news", first)
    assert (table[0].state, table[0].replica, table[0].restarts) == (ReplicaState.STARTING, second, 1)
    assert (table[0].version, table.latest_version) == (0, 3)  # the checkpoint's weights
    with pytest.raises(ValueError, match="STARTING cannot become STARTING"):
        table.replace(0, first)
    with pytest.raises(IndexError, match=r"actor index -1 out of range \[0, 1\)"):
        table.set_state(-1, ReplicaState.SERVING)


def test_one_that_waits_for_an_update_is_the_supervisors_again_once_it_continues() -> None:
    table = ReplicaTable("ab")
    for index, state in enumerate((ReplicaState.SERVING, ReplicaState.DEAD)):
        table.set_recovery(index, Recovery.UPDATE)
        table.set_state(index, state)
        assert table[index].recovery is Recovery.SUPERVISOR


def test_one_that_keeps_failing_takes_nothing_until_it_has_cooled_down() -> None:
    table = ReplicaTable("ab", ReplicaState.SERVING, FaultPolicy(breaker_failures=2, breaker_cooldown=0.05))
    table.fail(0, "bad")
    assert len(table.serving()) == 2
    heard: list[int] = []
    with listening(table, lambda: heard.append(len(table.serving()))):
        table.fail(0, "bad")
        assert [entry.index for entry in table.serving()] == [1]
        time.sleep(0.06)
        table.cool()
    assert (len(table.serving()), heard) == (2, [1, 2])
    assert table[0].last_error == "bad"


@pytest.mark.parametrize(
    ("error", "state"), [(None, "CLOSED"), (ValueError(), "HALF_OPEN"), (KeyboardInterrupt(), "HALF_OPEN")]
)
def test_an_error_under_a_lease_is_no_success_of_a_trial(error: BaseException | None, state: str) -> None:
    faults = FaultPolicy(breaker_failures=1, breaker_trials=1, probe=math.inf)
    with FakeAsyncVLLM(num_replicas=2, faults=faults) as engine:
        table, balancer = engine.replica_table, engine.load_balancer
        for index in range(2):
            table.fail(index, "bad")  # with the last one, both are tried at once
        with contextlib.suppress(ValueError, KeyboardInterrupt), balancer.acquire_at(0):
            if error is not None:
                raise error
        assert table[0].breaker.state.name == state


def test_of_bad_replicas_only_the_first_that_would_leave_nobody_is_tried_at_once() -> None:
    table = ReplicaTable("ab", ReplicaState.SERVING, FaultPolicy(breaker_failures=1, breaker_cooldown=3600.0))
    for index, expected in enumerate((["OPEN", "CLOSED"], ["HALF_OPEN", "HALF_OPEN"])):
        table.fail(index, "bad")
        assert [entry.breaker.state.name for entry in table] == expected


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


POLICY = FaultPolicy(breaker_failures=3, breaker_window=10.0, breaker_cooldown=5.0, breaker_trials=2)
FAIL = (0, "fail", "closed")
HALF_OPEN = (FAIL, FAIL, (0, "fail", "open *"), (5, "cool", "half-open"))


@pytest.mark.parametrize(
    "steps",
    [
        # failures within the window open it
        [FAIL, (5, "fail", "closed"), (10, "fail", "open *")],
        [FAIL, (5, "fail", "closed"), (10.1, "fail", "closed"), (14.9, "fail", "open *")],
        # an open one takes nothing until it has cooled down, and then a few at a time
        [*HALF_OPEN[:3], (4.9, "cool", "open *"), (5, "cool", "half-open")],
        [*HALF_OPEN, (5, "take", "half-open"), (5, "take", "half-open *"), (5, "unclear", "half-open")],
        # a good trial closes it, and forgets the failures
        [*HALF_OPEN, (5, "take", "half-open"), (5, "well", "closed"), (5, "fail", "closed"), (5, "fail", "closed")],
        # a failure opens it again for as long; the earlier trial is over, and would not close it
        [*HALF_OPEN, (5, "take", "half-open"), (5, "fail", "open *"), (5, "ill", "open *"), (9.9, "cool", "open *")],
        [*HALF_OPEN, (5, "take", "half-open"), (5, "fail", "open *"), (5, "well", "open *"), (10, "cool", "half-open")],
    ],
)
def test_a_breaker(steps: list[tuple[float, str, str]]) -> None:
    """When, what happens, and the state after it; ``*``: it blocks."""
    clock = Clock()
    breaker = Breaker(POLICY, clock)
    outcomes = {"well": True, "ill": False, "unclear": None}
    for now, what, expected in steps:
        clock.now = now
        if what in outcomes:
            breaker.tried(outcomes[what])
        elif what == "take":
            assert breaker.take() is (breaker.state is BreakerState.HALF_OPEN)
        else:
            {"fail": breaker.failed, "cool": breaker.cool}[what]()
        assert breaker.state.value + " *" * breaker.blocks == expected


def test_delays_stop_at_the_longest_however_many_there_were() -> None:
    assert FaultPolicy(first_delay=0.25, longest_delay=1.5).delay(10**6) == 1.5
