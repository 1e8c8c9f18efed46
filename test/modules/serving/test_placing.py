"""Placing: what a lease is asked for, and for which replicas it is worth waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.requests import named_requests
from support.strategies import Says
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.candidates import FaultPolicy, Recovery, ReplicaState
from torchrl_moe.modules.serving.in_flight import GROUP, Call, needs, prospect, take_lease, takes
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.requests import placements


def balancer(*states: str, **faults: Any) -> LoadBalancer:
    table = ReplicaTable(list(states), faults=FaultPolicy(**faults))
    for entry, state in zip(table, states, strict=True):
        entry.state = ReplicaState[state]
    holder = type("Holder", (), {"replica_table": table})()
    return LoadBalancer(holder, "requests")


def waits_for(lb: LoadBalancer, ends: bool = False, **placement: Any) -> int | None:
    (request,) = Call(lb, named_requests("a"), placements(1, **placement), 1.0 if ends else None).requests
    return prospect(request)


def waits(*arguments: Any, **keywords: Any) -> bool:
    return waits_for(*arguments, **keywords) is not None


@pytest.mark.parametrize(
    ("state", "recovery", "without_end", "with_end"),
    [
        ("STARTING", Recovery.NOBODY, True, True),  # as at the first start
        ("STARTING", Recovery.SUPERVISOR, True, True),
        ("STARTING", Recovery.UPDATE, False, True),
        ("DRAINING", Recovery.NOBODY, True, True),
        ("SYNCING", Recovery.NOBODY, True, True),
        ("SERVING", Recovery.SUPERVISOR, False, False),  # and yet it does not take it
        ("DEAD", Recovery.NOBODY, False, False),
        ("DEAD", Recovery.SUPERVISOR, True, True),
        ("QUARANTINED", Recovery.NOBODY, False, False),
        ("QUARANTINED", Recovery.SUPERVISOR, True, True),
    ],
)
def test_who_is_worth_waiting_for(state: str, recovery: Recovery, without_end: bool, with_end: bool) -> None:
    lb = balancer("DEAD", state)
    lb.replica_table[1].recovery = recovery
    assert waits(lb) is without_end
    assert waits(lb, ends=True) is with_end
    assert waits(lb, ends=True, actor_index=0) is False
    assert waits(lb, ends=True, actor_index=1) is with_end


def test_one_whose_breaker_is_open_is_worth_waiting_for() -> None:
    lb = balancer("SERVING", "SERVING", breaker_failures=1)
    lb.replica_table.fail(0, "bad")
    assert waits(lb, actor_index=0) is True
    assert waits(lb, actor_index=1) is False


def answered(lb: LoadBalancer, group: str, version: int) -> None:
    lb.groups.join(group, version)(True)


@pytest.mark.parametrize(("group", "expected"), [(1, True), (2, True), (0, False)])
def test_a_group_waits_only_for_those_that_may_come_with_its_version(group: int, expected: bool) -> None:
    lb = balancer("SERVING", "SYNCING")
    lb.replica_table.set_version(1, 1)  # it keeps that if its update fails, else it comes with the latest
    lb.replica_table.latest_version = 2
    answered(lb, "g", group)
    assert waits(lb, group_ids="g") is expected


def test_a_group_of_which_nobody_was_answered_may_yet_begin_again() -> None:
    lb = balancer("SERVING")
    over = lb.groups.join("g", 0)
    lb.replica_table.set_version(0, 1)
    assert waits_for(lb, group_ids="g") == GROUP
    over(True)
    assert waits(lb, group_ids="g") is False


def test_what_is_waited_for_is_the_first_that_may_come() -> None:
    lb = balancer("DEAD", "SERVING", "SYNCING", "DRAINING")
    assert waits_for(lb) == 2
    assert waits_for(lb, actor_index=3) == 3
    lb.replica_table.set_version(3, 4)
    lb.replica_table.latest_version = 5
    answered(lb, "g", 4)
    assert waits_for(lb, group_ids="g") == 3  # it may come back as it is; the other one comes with the latest


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({}, [3, 4, 5]),
        ({"min_version": 4}, [4, 5]),
        ({"group_ids": "new"}, [3, 4, 5]),
        ({"group_ids": "g"}, [4]),
        ({"group_ids": "g", "min_version": 4}, [4]),
        ({"group_ids": "g", "min_version": 5}, []),
    ],
    ids=str,
)
def test_which_versions_may_take_a_request(placement: dict[str, Any], expected: list[int]) -> None:
    lb = balancer("SERVING")
    answered(lb, "g", 4)
    (request,) = Call(lb, named_requests("a"), placements(1, **placement)).requests
    assert [version for version in (3, 4, 5) if takes(request, version)] == expected


def test_one_that_is_restarted_comes_with_the_latest_version() -> None:
    lb = balancer("DEAD")
    lb.replica_table.set_recovery(0, Recovery.SUPERVISOR)
    lb.replica_table.latest_version = 4
    answered(lb, "g", 4)
    answered(lb, "old", 3)
    assert waits(lb, group_ids="g") is True
    assert waits(lb, group_ids="old") is False


def test_what_strategies_see_is_the_requests_own() -> None:
    lb, ear = balancer("SERVING"), Says()
    holder = type("Holder", (), {"replica_table": lb.replica_table})()
    ids = np.array([1, 2], np.int32)
    requests = [
        Request(request_id="b", sampling_params=None, prompt="text"),
        Request(request_id="a", sampling_params=None, prompt_token_ids=ids),
    ]
    where = placements(2, session_ids=["s", "t"], request_context=[None, {"k": 1}])
    for request in reversed(Call(LoadBalancer(holder, ear), requests, where).requests):
        take_lease(request).release()
    seen = [(context.prompt, context.session_id, context.request_context) for _, context in ear.asked]
    assert seen == [(ids, "t", {"k": 1}), ("text", "s", {})]


def test_requests_that_any_replica_would_take_alike_have_the_same_needs() -> None:
    lb = balancer("SERVING")
    where = placements(3, session_ids=["s", "t", "u"], group_ids=["g", "g", "h"])
    call = Call(lb, named_requests("abc"), where)
    a, b, c = map(needs, call.requests)
    assert a == b != c
    (other,) = Call(lb, named_requests("d"), placements(1, group_ids="g")).requests
    assert needs(other) == a
    for changed in ({"min_version": 1}, {"actor_index": 0}):
        assert needs(Call(lb, named_requests("d"), placements(1, group_ids="g", **changed)).requests[0]) != a
    assert needs(Call(lb, named_requests("d"), placements(1, group_ids="g"), timeout=1.0).requests[0]) != a
