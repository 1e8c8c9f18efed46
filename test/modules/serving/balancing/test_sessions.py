"""``session``: new ones spread by sessions, old ones stay, unless their replica is too busy, away or gone."""

from __future__ import annotations

from collections import Counter

import pytest

from support.clock import Clock
from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.strategies import SessionAffinity


def balancer(num_replicas: int, **kwargs: object) -> tuple[LoadBalancer, SessionAffinity]:
    strategy = SessionAffinity(**kwargs)  # type: ignore[arg-type]
    return LoadBalancer(list(range(num_replicas)), [strategy, "requests"]), strategy


def turn(lb: LoadBalancer, session: str) -> int:
    with lb.acquire(session_id=session) as lease:
        return lease.index


def active(lb: LoadBalancer, strategy: SessionAffinity) -> list[int]:
    return [strategy.active_sessions(index) for index in range(len(lb.replica_table))]


def test_8_sessions_on_8_idle_replicas_fan_out_one_each_and_stay() -> None:
    lb, _ = balancer(8)
    first = [turn(lb, f"{i}") for i in range(8)]
    assert first == list(range(8))
    for _ in range(3):
        assert [turn(lb, f"{i}") for i in range(8)] == first


def test_256_sessions_at_concurrency_4_stay_even() -> None:
    lb, strategy = balancer(8)
    where: dict[int, set[int]] = {}
    for start in range(0, 256, 4):
        for _turn in range(3):
            leases = [(i, lb.acquire(session_id=f"{i}")) for i in range(start, start + 4)]
            for i, lease in leases:
                where.setdefault(i, set()).add(lease.index)
                lease.release()
    assert Counter(index for places in where.values() for index in places) == dict.fromkeys(range(8), 32)
    assert active(lb, strategy) == [32] * 8


def test_a_new_session_counts_sessions_and_not_requests() -> None:
    lb, _ = balancer(2)
    assert turn(lb, "a") == 0
    held = [lb.acquire_at(1) for _ in range(5)]
    assert turn(lb, "b") == 1
    assert len(held) == 5


def test_a_session_moves_for_good_when_its_replica_is_too_busy() -> None:
    lb, strategy = balancer(2, margin=2.0)
    turn(lb, "a")
    held = [lb.acquire_at(0) for _ in range(3)]
    assert turn(lb, "a") == 0  # 3 + 1 is no more than the mean of 2 and two above
    held.append(lb.acquire_at(0))
    assert turn(lb, "a") == 1
    for lease in held:
        lease.release()
    assert turn(lb, "a") == 1
    assert active(lb, strategy) == [0, 1]


def test_only_the_session_that_comes_moves() -> None:
    lb, strategy = balancer(2)
    for name in "abcd":
        turn(lb, name)
    assert active(lb, strategy) == [2, 2]
    held = [lb.acquire_at(0) for _ in range(10)]
    assert turn(lb, "a") == 1
    assert active(lb, strategy) == [1, 3]
    assert len(held) == 10


@pytest.mark.parametrize("away", [ReplicaState.DRAINING, ReplicaState.SYNCING])
def test_a_short_drain_borrows_a_replica_and_the_session_returns(away: ReplicaState) -> None:
    lb, strategy = balancer(3)
    assert [turn(lb, name) for name in "ab"] == [0, 1]
    lb.replica_table.set_state(0, away)
    assert turn(lb, "a") == 2  # as the next strategy says
    assert active(lb, strategy) == [1, 1, 0]
    lb.replica_table.set_state(0, ReplicaState.SERVING)
    assert turn(lb, "a") == 0


def test_a_replica_too_old_for_a_request_is_away_too() -> None:
    lb, _ = balancer(2)
    assert turn(lb, "a") == 0
    lb.replica_table.set_version(1, 1)
    with lb.acquire(session_id="a", min_version=1) as lease:
        assert lease.index == 1
    assert turn(lb, "a") == 0


@pytest.mark.parametrize("gone", [ReplicaState.DEAD, ReplicaState.QUARANTINED])
def test_death_moves_the_session_for_good(gone: ReplicaState) -> None:
    lb, strategy = balancer(2)
    assert turn(lb, "a") == 0
    lb.replica_table.set_state(0, gone)
    assert turn(lb, "a") == 1
    lb.replica_table.set_state(0, ReplicaState.STARTING)
    lb.replica_table.set_state(0, ReplicaState.SERVING)
    assert turn(lb, "a") == 1
    assert active(lb, strategy) == [0, 1]


def test_a_silent_session_ends_and_a_turn_keeps_it() -> None:
    clock = Clock()
    lb, strategy = balancer(2, idle_seconds=10.0, clock=clock)
    turn(lb, "a")
    turn(lb, "b")
    clock.now = 8.0
    turn(lb, "a")
    clock.now = 12.0
    turn(lb, "c")  # b has been silent for 12 seconds: its replica has room
    assert active(lb, strategy) == [1, 1]
    clock.now = 18.0
    assert turn(lb, "a") == 0
    clock.now = 40.0
    assert turn(lb, "d") == 0  # no session is left, and 1 was the last to get one: c
    assert active(lb, strategy) == [1, 0]


def test_a_finished_session_gives_its_place_back_once() -> None:
    lb, strategy = balancer(2)
    turn(lb, "a")
    turn(lb, "b")
    lb.finish_session("a")
    lb.finish_session("a")
    lb.finish_session("unknown")
    assert active(lb, strategy) == [0, 1]
    assert turn(lb, "c") == 0


def test_without_a_session_the_next_strategy_is_asked() -> None:
    lb, strategy = balancer(2)
    assert [lb.acquire().index for _ in range(3)] == [0, 1, 0]
    assert active(lb, strategy) == [0, 0]


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_moe.modules.serving.strategies.MOST_SESSIONS", 3)
    lb, strategy = balancer(2)
    for i in range(10):
        turn(lb, f"{i}")
    assert sum(active(lb, strategy)) == 3
