"""The balancer: a hierarchy of opinions, groups, and leases that count each request exactly once."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from support.clock import Clock
from support.strategies import Says
from torchrl_moe.errors import NoReplicaError, StaleReplicaError
from torchrl_moe.modules.serving import replica_table
from torchrl_moe.modules.serving.balancer import Lease, LoadBalancer
from torchrl_moe.modules.serving.replica_table import TRANSITIONS, Groups, ReplicaState, TableEntry
from torchrl_moe.modules.serving.strategies import (
    STRATEGIES,
    KVCache,
    LeastRequests,
    PowerOfTwo,
    PrefixAware,
    RoundRobin,
    RoutingContext,
    SessionAffinity,
    make_strategy,
)
from torchrl_moe.testing import FakeAsyncVLLM


@pytest.mark.parametrize("wrong", [[], (), "actors", None, 3], ids=repr)
def test_something_without_replicas_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected a service or a non-empty list of replicas, got"):
        LoadBalancer(wrong)


def inflight(lb: LoadBalancer) -> list[int]:
    return [entry.inflight for entry in lb.replica_table]


def versions(lb: LoadBalancer, *numbers: int) -> None:
    for index, version in enumerate(numbers):
        lb.replica_table.set_version(index, version)


def test_torchrls_arguments_stand_where_they_stood_and_its_attributes_say_what_it_was_made_with() -> None:
    lb = LoadBalancer(["a", "b"], ["round_robin", "requests"], 16, 2.0)
    assert (lb.actors, lb.async_vllm) == (["a", "b"], None)
    assert (lb.strategy, lb.strategies) == ("round-robin", ["round-robin", "requests"])
    assert (lb.prefix_length, lb.overload_threshold) == (16, 2.0)
    assert LoadBalancer(actors=["a"]).strategies == ["prefix-aware", "requests"]


def test_the_actors_of_an_engine_stand_for_it() -> None:
    with FakeAsyncVLLM(3) as engine:
        for given in (engine, engine.actors, tuple(engine.actors)):
            lb = LoadBalancer(given, "requests")
            assert lb.async_vllm is engine
            assert lb.replica_table is engine.replica_table
            assert lb.actors == engine.actors
        engine.remove_replica(1)
        assert [actor.index for actor in LoadBalancer(engine.actors).actors] == [0, 2]
        for some in (engine.actors[:1], engine.actors[::-1], [*engine.actors, "another"], ["another", *engine.actors]):
            with pytest.raises(ValueError, match="expected all actors of one engine, in their order"):
                LoadBalancer(some)


def test_a_strategy_sees_candidates_and_request_and_without_an_opinion_the_least_loaded_is_taken() -> None:
    ear = Says(None)
    lb = LoadBalancer(list("abcd"), ear)
    lb.replica_table.set_state(0, ReplicaState.SYNCING)
    versions(lb, 0, 5, 0, 5)
    lb.acquire_at(1)
    assert lb.acquire([1, 2], session_id="s", min_version=5, request_context={"user": 7}).index == 3
    ((candidates, context),) = ear.asked
    assert candidates == [1, 3]
    assert (context.prompt, context.session_id, context.request_context) == ([1, 2], "s", {"user": 7})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Mock(side_effect=ZeroDivisionError("mine")), r"failed with ZeroDivisionError\('mine'\)"),
        *((answer, "chose replica .*, not one of 0, 1") for answer in (2, -1, "a")),
        ([0], "failed with TypeError"),
    ],
)
def test_one_that_fails_or_chooses_no_candidate_is_passed_over_with_one_warning(answer: Any, words: str) -> None:
    lb = LoadBalancer(["a", "b"], [Says(answer, "lost"), Says(1)])
    with pytest.warns(UserWarning, match=f"strategy 'lost' {words}") as seen:
        assert [lb.acquire().index for _ in range(4)] == [1] * 4
    assert len(seen) == 1
    assert inflight(lb) == [0, 4]


def test_strategies_learn_of_every_placement_and_one_that_fails_to_keeps_no_other_from_it() -> None:
    class Forgetful(Says):
        def placed(self, entry: TableEntry, context: RoutingContext) -> None:
            raise KeyError("full")

    first, last = Says(), Says(0)
    lb = LoadBalancer(["a", "b"], [first, Forgetful(1, "forgetful"), last])
    with pytest.warns(UserWarning, match=r"strategy 'forgetful' failed to learn with KeyError\('full'\)") as seen:
        assert [lb.acquire().index for _ in range(2)] == [1, 1]
    assert len(seen) == 1
    assert (first.learnt, last.learnt) == ([1, 1], [1, 1])
    lb = LoadBalancer(["a", "b"], Forgetful(1, "forgetful"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="failed to learn"):
            lb.acquire()
    assert inflight(lb) == [0, 0]  # it has no lease, which nobody could release


def test_a_strategy_that_cannot_finish_a_session_keeps_no_other_from_it() -> None:
    class Keeps(Says):
        def finish_session(self, session_id: str) -> None:
            raise KeyError(session_id)

    class Hears(Says):
        def finish_session(self, session_id: str) -> None:
            heard.append(session_id)

    heard: list[str] = []
    lb = LoadBalancer(["a"], [Keeps(name="keeps"), Hears()])
    with pytest.warns(UserWarning, match=r"strategy 'keeps' failed to finish a session with KeyError\('s'\)"):
        lb.finish_session("s")
    assert heard == ["s"]


def test_a_keyboard_interrupt_is_no_failure() -> None:
    lb = LoadBalancer(["a"], [Says(Mock(side_effect=KeyboardInterrupt())), "requests"])
    with pytest.raises(KeyboardInterrupt):
        lb.acquire()
    assert inflight(lb) == [0]


def test_min_version_keeps_stale_replicas_out() -> None:
    lb = LoadBalancer(list("abc"))
    versions(lb, 3, 5, 4)
    assert [lb.acquire(min_version=4).index for _ in range(3)] == [1, 2, 1]
    assert lb.acquire(min_version=5).index == 1
    with pytest.raises(StaleReplicaError, match="no serving replica holds version 6; the newest is 5"):
        lb.acquire(min_version=6)
    lb.replica_table.set_state(1, ReplicaState.SYNCING)
    with pytest.raises(StaleReplicaError, match="no serving replica holds version 5; the newest is 4"):
        lb.acquire(min_version=5)
    assert sum(inflight(lb)) == 4


def test_a_replica_can_be_named() -> None:
    lb = LoadBalancer(["a", "b"])
    lb.replica_table.set_version(1, 2)
    assert [lb.acquire_at(1).index, lb.acquire_at(1, min_version=2).index] == [1, 1]
    assert inflight(lb) == [0, 2]
    with pytest.raises(StaleReplicaError, match="replica 1 holds version 2, asked for 3"):
        lb.acquire_at(1, min_version=3)
    with pytest.raises(IndexError, match=r"actor index 2 out of range \[0, 2\)"):
        lb.acquire_at(2)
    lb.replica_table.set_state(1, ReplicaState.DRAINING)
    with pytest.raises(NoReplicaError, match="replica 1 is DRAINING, not SERVING; leave actor_index out"):
        lb.acquire_at(1)
    assert inflight(lb) == [0, 2]


def test_select_actor_answers_and_counts_nothing() -> None:
    lb = LoadBalancer(["a", "b"], "requests")
    assert [lb.select_actor("hi") for _ in range(4)] == [0, 1, 0, 1]  # ties take turns
    assert inflight(lb) == [0, 0]
    assert [stats["decisions"] for stats in lb.get_stats()["actor_stats"]] == [0, 0]
    lb.acquire_at(0)
    assert [lb.select_actor() for _ in range(2)] == [1, 1]


def test_stats_have_torchrls_keys_where_they_have_a_meaning() -> None:
    lb = LoadBalancer(list("abc"), ["round-robin", "requests"])
    lb.replica_table.set_version(1, 7)
    leases = [lb.acquire() for _ in range(4)]
    leases[1].release()
    lb.observe(2, pending_requests=9, cache_usage=0.25)
    common = {"state": "SERVING", "cache_usage": None}
    assert lb.get_stats() == {
        "strategies": ["round-robin", "requests"],
        "primary_strategy": "round-robin",
        "num_actors": 3,
        "prefix_length": None,
        "overload_threshold": 1.15,
        "round_robin_index": 1,
        "actor_stats": [
            {**common, "actor_index": 0, "version": 0, "pending_requests": 2, "decisions": 2},
            {**common, "actor_index": 1, "version": 7, "pending_requests": 0, "decisions": 1},
            {**common, "actor_index": 2, "version": 0, "pending_requests": 9, "decisions": 1, "cache_usage": 0.25},
        ],
    }


def test_a_report_counts_where_it_is_more_than_was_counted_here() -> None:
    lb = LoadBalancer(list("ab"), "requests")
    lb.observe(0, pending_requests=10_000)
    assert [lb.acquire().index for _ in range(5)] == [1] * 5
    lb.observe(0, pending_requests=2)
    assert [lb.acquire().index for _ in range(3)] == [0] * 3  # those reported may be ours: loads 2, 2 and 3
    assert inflight(lb) == [3, 5]


def test_a_report_holds_for_five_seconds_and_not_of_one_that_started_over() -> None:
    clock = Clock()
    lb = LoadBalancer(list("ab"), "requests", clock=clock)
    lb.observe(0, pending_requests=50)
    clock.now = 4.0
    assert lb.select_actor() == 1
    lb.observe(0, pending_requests=40, cache_usage=0.5)
    clock.now = 8.0  # the first report is too old, the second is not
    assert lb.select_actor() == 1
    clock.now = 9.5
    assert lb.select_actor() == 0
    lb.observe(0, pending_requests=40)
    for state in (ReplicaState.DEAD, ReplicaState.STARTING, ReplicaState.SERVING):
        lb.replica_table.set_state(0, state)
    lb.acquire_at(1)
    assert lb.select_actor() == 0
    assert lb.get_stats()["actor_stats"][0]["cache_usage"] is None


def test_a_group_stays_on_the_newest_version_that_served_when_it_began() -> None:
    lb = LoadBalancer(list("abcd"), "requests")
    versions(lb, 1, 2, 2, 1)
    assert {lb.acquire(group_id="g").version for _ in range(8)} == {2}
    assert inflight(lb) == [0, 4, 4, 0]
    lb.replica_table.set_version(0, 3)
    assert [lb.acquire(group_id=group).version for group in "gh"] == [2, 3]
    assert lb.acquire(group_id="g", min_version=2).version == 2
    with pytest.raises(StaleReplicaError, match="group 'g' is on version 2, asked for 3"):
        lb.acquire(group_id="g", min_version=3)
    assert sum(inflight(lb)) == 11


class Leasing(RuleBasedStateMachine):
    """Whatever is acquired, released (also twice) or changed: load is the number of leases held."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.lb = LoadBalancer(list("abc"), [Says(None), "requests"], clock=self.clock)
        self.held: dict[int, Lease] = {}
        self.given = 0

    @rule(target=leases, index=st.none() | st.integers(0, 2), min_version=st.integers(0, 3))
    def acquire(self, index: int | None, min_version: int) -> Any:
        with self.lb.replica_table.changed:
            self.lb.replica_table.expire(self.clock.now - 5.0)
        listed = [entry for entry in self.lb.replica_table if index in (None, entry.index)]
        fit = [entry for entry in listed if entry.state is ReplicaState.SERVING and entry.version >= min_version]
        least = min((entry.load for entry in fit), default=0)
        try:
            lease = (
                self.lb.acquire(min_version=min_version) if index is None else self.lb.acquire_at(index, min_version)
            )
        except (NoReplicaError, StaleReplicaError):
            assert not fit
            return None
        entry = self.lb.replica_table[lease.index]
        assert entry in fit
        assert entry.load in (least, least + 1)  # a report may hide one more
        self.held[id(lease)] = lease
        self.given += 1
        return lease

    @rule(lease=leases)
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            with lease:
                pass
            lease.release()
            self.held.pop(id(lease), None)

    @rule(index=st.integers(0, 2), data=st.data())
    def change_state(self, index: int, data: st.DataObject) -> None:
        allowed = sorted(TRANSITIONS[self.lb.replica_table[index].state], key=lambda state: state.name)
        self.lb.replica_table.set_state(index, data.draw(st.sampled_from(allowed)))

    @rule(index=st.integers(0, 2), pending=st.integers(0, 5), seconds=st.floats(0.0, 4.0))
    def update_and_report(self, index: int, pending: int, seconds: float) -> None:
        self.lb.replica_table.set_version(index, self.lb.replica_table[index].version + 1)
        self.lb.observe(index, pending_requests=pending)
        self.clock.now += seconds

    @rule()  # no invariant: changes are to add up between two questions
    def the_least_loaded_is_found(self) -> None:
        with self.lb.replica_table.changed:
            candidates = self.lb.replica_table.serving()
            serving = [entry for entry in self.lb.replica_table if entry.state is ReplicaState.SERVING]
            assert candidates.total == sum(entry.load for entry in serving)
            if serving:
                best = min(serving, key=lambda entry: (entry.load, entry.chosen, entry.index))
                assert candidates.least_loaded() is best

    @invariant()
    def load_and_decisions_are_the_leases(self) -> None:
        expected = [sum(lease.index == index for lease in self.held.values()) for index in range(3)]
        assert inflight(self.lb) == expected
        assert sum(stats["decisions"] for stats in self.lb.get_stats()["actor_stats"]) == self.given


def test_load_equals_the_leases_held_after_any_sequence() -> None:
    run_state_machine_as_test(Leasing, settings=settings(max_examples=30, stateful_step_count=40))


def test_a_lease_keeps_the_replica_and_the_version_that_it_was_given_for() -> None:
    lb = LoadBalancer(["a", "b"])
    lb.replica_table.set_version(0, 4)
    lease = lb.acquire()
    lb.replica_table.set_version(0, 5)
    lb.replica_table.mark_dead(0)
    lb.replica_table.replace(0, "c")
    assert (lease.index, lease.version, lease.replica, lb.replica_table[0].replica) == (0, 4, "a", "c")
    lease.release(False)
    assert inflight(lb) == [0, 0]


def test_two_threads_that_both_found_the_lease_held_give_one_place_back() -> None:
    lb = LoadBalancer(["a"])
    lease = lb.acquire()
    threads = [threading.Thread(target=lease.release) for _ in range(2)]
    with lb.replica_table.changed:  # both get past any first look, and wait here
        for thread in threads:
            thread.start()
        threads[0].join(0.05)
    for thread in threads:
        thread.join()
    assert inflight(lb) == [0]


def test_groups_with_requests_under_way_are_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_table, "MOST_GROUPS", 64)
    groups, count = Groups(), 64 + 1
    ends = [groups.join(str(number), 1) for number in range(count)]
    groups.join("0", 2)(True)  # a later request of the first is on the same version
    assert {groups.version(str(number)) for number in range(count)} == {1}
    for over in ends:
        over(True)
    assert groups.version("0") is None  # those are bounded
    assert groups.version(str(count - 1)) == 1


def test_an_end_that_settles_what_others_wait_for_is_reported_once() -> None:
    groups, told = Groups(), []
    groups.listeners.add(told.append)
    first, second = (groups.join("g", 3) for _ in range(2))
    assert groups.may_begin_again("g")
    first(False)
    assert (told, groups.version("g")) == ([], 3)  # the second may still be answered
    second(None)
    assert (told, groups.version("g")) == (["g"], None)
    third, fourth = (groups.join("g", 4) for _ in range(2))
    assert groups.may_begin_again("g")
    third(True)
    assert (told, groups.may_begin_again("g")) == (["g", "g"], False)
    fourth(False)
    assert (told, groups.version("g")) == (["g", "g"], 4)


def test_a_name_makes_a_strategy_of_its_own_and_an_unknown_one_lists_those_of_the_page() -> None:
    kinds = [PrefixAware, SessionAffinity, LeastRequests, LeastRequests, KVCache, PowerOfTwo, RoundRobin]
    names = ["prefix-aware", "session", "requests", "least-loaded", "kv-cache", "power-of-two", "round-robin"]
    assert sorted(names) == sorted(STRATEGIES)
    for name, kind in zip(names, kinds, strict=True):
        made, other = make_strategy(name), make_strategy(name.replace("-", "_"))
        assert type(made) is type(other) is kind
        assert made is not other  # a turn is not shared between balancers
        assert LoadBalancer(["a"], name).acquire().index == 0
    valid = ", ".join(sorted(names))
    with pytest.raises(ValueError, match=f"unknown strategy 'fastest'; valid strategies: {valid}"):
        LoadBalancer(["a"], "fastest")
    with pytest.raises(ValueError, match=f"strategy is empty: name at least one.*valid strategies: {valid}"):
        LoadBalancer(["a"], [])
    page = (Path(__file__).parents[3] / "docs" / "service.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert STRATEGIES.keys() <= {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
