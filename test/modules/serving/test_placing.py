"""Placing: for whom it is worth waiting, and with which words a wait ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.strategies import Says
from torchrl_moe._errors import NoReplicaError, ReplicaDiedError, StaleReplicaError
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.serving.candidates import Recovery
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.load_balancer import LoadBalancer
from torchrl_moe.modules.serving.placing import Placement, Placer
from torchrl_moe.modules.serving.roster import Roster
from torchrl_moe.modules.serving.states import ReplicaState


def balancer(*states: str, **faults: Any) -> LoadBalancer:
    roster = Roster(list(states), faults=FaultPolicy(**faults))
    for entry, state in zip(roster, states, strict=True):
        entry.state = ReplicaState[state]
    holder = type("Holder", (), {"roster": roster})()
    return LoadBalancer(holder, "requests")


def placer(lb: LoadBalancer, ends: bool = False, **placement: Any) -> Placer:
    return Placer(lb, Placement(**placement), ends)


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
    lb.roster[1].recovery = recovery
    assert placer(lb).may_wait(0) is without_end
    assert placer(lb, ends=True).may_wait(0) is with_end
    assert placer(lb, ends=True, actor_index=0).may_wait(0) is False
    assert placer(lb, ends=True, actor_index=1).may_wait(0) is with_end


def test_one_whose_breaker_is_open_is_worth_waiting_for() -> None:
    lb = balancer("SERVING", "SERVING", breaker_failures=1)
    lb.roster.fail(0, "bad")
    assert placer(lb, actor_index=0).may_wait(0) is True
    assert placer(lb, actor_index=1).may_wait(0) is False


def answered(lb: LoadBalancer, group: str, version: int) -> None:
    lb.groups.join(group, version)(True)


@pytest.mark.parametrize(("group", "expected"), [(1, True), (2, True), (0, False)])
def test_a_group_waits_only_for_those_that_may_come_with_its_version(group: int, expected: bool) -> None:
    lb = balancer("SERVING", "SYNCING")
    lb.roster.set_version(1, 1)  # it keeps that if its update fails, else it comes with the latest
    lb.roster.latest_version = 2
    answered(lb, "g", group)
    assert placer(lb, group_ids=["g"]).may_wait(0) is expected


def test_a_group_of_which_nobody_was_answered_may_yet_begin_again() -> None:
    lb = balancer("SERVING")
    over = lb.groups.join("g", 0)
    lb.roster.set_version(0, 1)
    assert placer(lb, group_ids=["g"]).may_wait(0) is True
    over(True)
    assert placer(lb, group_ids=["g"]).may_wait(0) is False


def test_one_that_is_restarted_comes_with_the_latest_version() -> None:
    lb = balancer("DEAD")
    lb.roster.set_recovery(0, Recovery.SUPERVISOR)
    lb.roster.latest_version = 4
    answered(lb, "g", 4)
    answered(lb, "old", 3)
    assert placer(lb, group_ids=["g", "old"]).may_wait(0) is True
    assert placer(lb, group_ids=["g", "old"]).may_wait(1) is False


def test_what_strategies_see_is_the_requests_own() -> None:
    lb, ear = balancer("SERVING"), Says()
    holder = type("Holder", (), {"roster": lb.roster})()
    where = placer(LoadBalancer(holder, ear), session_ids=["s", "t"], request_context={"k": 1})
    ids = np.array([1, 2], np.int32)
    where.lease(1, Request(request_id="a", sampling_params=None, prompt_token_ids=ids)).release()
    where.lease(0, Request(request_id="b", sampling_params=None, prompt="text")).release()
    seen = [(context.prompt, context.session_id, context.request_context) for _, context in ear.asked]
    assert seen == [(ids, "t", {"k": 1}), ("text", "s", {"k": 1})]


@pytest.mark.parametrize(
    ("refusal", "state", "placement", "kind", "words"),
    [
        (NoReplicaError("nobody"), "DEAD", {}, NoReplicaError, "nobody"),
        (StaleReplicaError("too old"), "SERVING", {"actor_index": 0}, StaleReplicaError, "too old"),
        (NoReplicaError("busy"), "SYNCING", {"actor_index": 0}, NoReplicaError, "busy"),
        (
            NoReplicaError("nobody"),
            "DEAD",
            {"actor_index": 0},
            ReplicaDiedError,
            "replica 0, which actor_index names, is dead: its process is gone",
        ),
    ],
)
def test_the_words_at_the_end(refusal: Any, state: str, placement: Any, kind: type[Exception], words: str) -> None:
    error = placer(balancer(state), **placement).error(refusal, None, ["a", None])
    assert (type(error), str(error), error.partial) == (kind, words, ["a", None])


def test_a_death_before_is_told_too() -> None:
    error = placer(balancer("DEAD")).error(NoReplicaError("nobody"), ReplicaDiedError("out of memory"), [])
    assert str(error) == "nobody. It had begun elsewhere: out of memory"
