"""The balancer: a hierarchy of opinions, and leases that count each request exactly once."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from support.clock import Clock
from support.strategies import Says
from torchrl_moe.errors import EngineError, NoReplicaError, StaleReplicaError
from torchrl_moe.modules.serving.balancer import Lease, LoadBalancer
from torchrl_moe.modules.serving.candidates import TRANSITIONS, Candidates, ReplicaState, TableEntry
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.strategies import RoutingContext, Strategy
from torchrl_moe.testing import FakeAsyncVLLM


def inflight(lb: LoadBalancer) -> list[int]:
    return [entry.inflight for entry in lb.replica_table]


# -- construction -----------------------------------------------------------------------------------------------------


def test_a_list_of_replicas_is_taken_to_be_serving() -> None:
    lb = LoadBalancer(["a", "b"])
    assert [entry.state for entry in lb.replica_table] == [ReplicaState.SERVING] * 2
    assert [entry.replica for entry in lb.replica_table] == ["a", "b"]


def test_a_service_is_balanced_over_its_own_replicas() -> None:
    class Service:
        replica_table = ReplicaTable("abc", ReplicaState.SERVING)

    lb = LoadBalancer(Service())
    lb.acquire()
    assert lb.replica_table is Service.replica_table
    assert [entry.inflight for entry in Service.replica_table] == [1, 0, 0]


@pytest.mark.parametrize("wrong", [[], (), "actors", None, 3], ids=repr)
def test_something_without_replicas_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected a service or a non-empty list of replicas, got"):
        LoadBalancer(wrong)


@pytest.mark.parametrize("strategy", ["least_loaded", "round_robin", ["round_robin", "requests"], ("requests",)])
def test_names_may_have_underscores_and_come_alone_or_in_any_sequence(strategy: Any) -> None:
    lb = LoadBalancer(["a", "b"], strategy)
    assert [lb.acquire().index for _ in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("strategy", ["fastest", ["requests", "fastest"], ""])
def test_an_unknown_name_is_refused_wherever_it_stands(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown strategy '(fastest)?'; valid strategies: .*requests, round-robin"):
        LoadBalancer(["a"], strategy)


def test_an_empty_hierarchy_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy is empty: name at least one, for example 'requests'"):
        LoadBalancer(["a"], [])


def test_torchrls_arguments_stand_where_they_stood() -> None:
    lb = LoadBalancer(["a", "b"], ["prefix-aware", "requests"], 16, 1.5)
    stats = lb.get_stats()
    assert (stats["prefix_length"], stats["overload_threshold"]) == (16, 1.5)
    with pytest.raises(ValueError, match="prefix_length must be an integer of at least 1, or None, got 0"):
        LoadBalancer(["a"], prefix_length=0)
    with pytest.raises(ValueError, match=r"overload_threshold must be a number of at least 1, got 0\.5"):
        LoadBalancer(["a"], overload_threshold=0.5)


def test_torchrls_attributes_say_what_it_was_made_with() -> None:
    lb = LoadBalancer(actors=["a", "b"], strategy=["round_robin", "requests"], prefix_length=16, overload_threshold=2.0)
    assert (lb.actors, lb.async_vllm) == (["a", "b"], None)
    assert (lb.strategy, lb.strategies) == ("round-robin", ["round-robin", "requests"])
    assert (lb.prefix_length, lb.overload_threshold) == (16, 2.0)
    assert LoadBalancer(["a"]).strategies == ["prefix-aware", "requests"]
    for name in ("actors", "strategy", "prefix_length"):
        with pytest.raises(AttributeError):
            setattr(lb, name, None)


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


# -- the hierarchy ----------------------------------------------------------------------------------------------------


def test_by_default_prefixes_come_first_and_then_load() -> None:
    lb = LoadBalancer(list("abc"))
    assert lb.get_stats()["strategies"] == ["prefix-aware", "requests"]
    with lb.acquire("x" * 100):
        assert lb.acquire().index == 1
    assert lb.acquire("x" * 100).index == 0


def test_the_first_opinion_wins_and_the_rest_is_not_asked() -> None:
    silent, loud, late = Says(None), Says(2), Says(1)
    lb = LoadBalancer(list("abc"), [silent, loud, late])
    assert lb.acquire().index == 2
    assert (len(silent.asked), len(loud.asked), len(late.asked)) == (1, 1, 0)


def test_without_any_opinion_the_least_loaded_is_taken() -> None:
    lb = LoadBalancer(list("abc"), [Says(None), Says(None)])
    assert [lb.acquire().index for _ in range(4)] == [0, 1, 2, 0]
    assert inflight(lb) == [2, 1, 1]


def test_a_strategy_sees_only_candidates_and_the_whole_request() -> None:
    ear = Says(None)
    lb = LoadBalancer(list("abcd"), ear)
    lb.replica_table.set_state(0, ReplicaState.SYNCING)
    lb.replica_table.set_version(1, 5)
    lb.replica_table.set_version(3, 5)
    lb.acquire([1, 2], session_id="s", min_version=5, request_context={"user": 7})
    ((candidates, context),) = ear.asked
    assert candidates == [1, 3]
    assert (context.prompt, context.session_id, context.request_context) == ([1, 2], "s", {"user": 7})


def test_a_strategy_that_fails_is_passed_over_and_the_request_is_counted_once() -> None:
    class Broken(Strategy):
        name = "broken"

        def choose(self, candidates: Candidates, context: RoutingContext) -> int:
            raise ZeroDivisionError

    lb = LoadBalancer(["a", "b"], [Broken(), "requests"])
    with pytest.warns(UserWarning, match="strategy 'broken' failed with ZeroDivisionError"):
        assert [lb.acquire().index for _ in range(4)] == [0, 1, 0, 1]
    assert inflight(lb) == [2, 2]


def test_a_warning_that_is_an_error_counts_nothing() -> None:
    class Forgetful(Says):
        def placed(self, entry: TableEntry, context: RoutingContext) -> None:
            raise KeyError

    lb = LoadBalancer(["a", "b"], Forgetful(1, "forgetful"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="strategy 'forgetful' failed to learn"):
            lb.acquire()
    assert inflight(lb) == [0, 0]


# -- who may serve ----------------------------------------------------------------------------------------------------


PATHS = {
    ReplicaState.STARTING: [ReplicaState.DEAD, ReplicaState.STARTING],
    ReplicaState.DRAINING: [ReplicaState.DRAINING],
    ReplicaState.SYNCING: [ReplicaState.SYNCING],
    ReplicaState.QUARANTINED: [ReplicaState.SYNCING, ReplicaState.QUARANTINED],
    ReplicaState.DEAD: [ReplicaState.DEAD],
}
"""From SERVING to each other state."""


@pytest.mark.parametrize("state", PATHS)
def test_only_a_serving_replica_takes_requests(state: ReplicaState) -> None:
    lb = LoadBalancer(["a", "b"])
    assert lb.acquire().index == 0
    for step in PATHS[state]:
        lb.replica_table.set_state(0, step)
    assert [lb.acquire().index for _ in range(3)] == [1, 1, 1]
    for step in PATHS[state]:
        lb.replica_table.set_state(1, step)
    with pytest.raises(NoReplicaError, match=f"no replica is serving: .*#1 {state.name}") as caught:
        lb.acquire()
    assert isinstance(caught.value, EngineError)
    with pytest.raises(NoReplicaError):
        lb.select_actor()
    assert inflight(lb) == [1, 3]


def test_min_version_keeps_stale_replicas_out() -> None:
    lb = LoadBalancer(list("abc"))
    for index, version in enumerate((3, 5, 4)):
        lb.replica_table.set_version(index, version)
    assert [lb.acquire(min_version=4).index for _ in range(3)] == [1, 2, 1]
    assert [lb.acquire(min_version=5).index for _ in range(2)] == [1, 1]
    with pytest.raises(StaleReplicaError, match="no serving replica holds version 6; the newest is 5"):
        lb.acquire(min_version=6)
    lb.replica_table.set_state(1, ReplicaState.SYNCING)
    with pytest.raises(StaleReplicaError, match="no serving replica holds version 5; the newest is 4"):
        lb.acquire(min_version=5)
    assert sum(inflight(lb)) == 5


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


# -- TorchRL's names --------------------------------------------------------------------------------------------------


def test_select_actor_answers_and_counts_nothing() -> None:
    lb = LoadBalancer(["a", "b"], "requests")
    assert [lb.select_actor("hi") for _ in range(4)] == [0, 1, 0, 1]  # ties take turns
    assert inflight(lb) == [0, 0]
    assert [stats["decisions"] for stats in lb.get_stats()["actor_stats"]] == [0, 0]
    lb.acquire_at(0)
    assert [lb.select_actor() for _ in range(2)] == [1, 1]


def test_select_actor_has_a_memory_for_prefixes() -> None:
    lb = LoadBalancer(list("abcd"))
    prompts = ["a" * 100, "b" * 100, "c" * 100]
    assert [lb.select_actor(prompt) for prompt in prompts] == [0, 1, 2]
    assert [lb.select_actor(prompt) for prompt in prompts[::-1]] == [2, 1, 0]


def test_select_actor_takes_its_turn_in_round_robin_as_torchrls_does() -> None:
    lb = LoadBalancer(list("abc"), "round-robin")
    assert [lb.select_actor() for _ in range(4)] == [0, 1, 2, 0]


def test_select_actor_passes_prompt_and_context_on() -> None:
    ear = Says(1)
    lb = LoadBalancer(["a", "b"], ear)
    assert lb.select_actor(prompt="hi", request_context={"k": 1}) == 1
    context = ear.asked[0][1]
    assert (context.prompt, context.request_context) == ("hi", {"k": 1})


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


def test_the_round_robin_index_wraps_and_is_0_without_that_strategy() -> None:
    lb = LoadBalancer(["a", "b"], ["requests", "round-robin"])
    assert lb.get_stats()["round_robin_index"] == 0
    turns = LoadBalancer(["a", "b"], "round-robin")
    turns.acquire()
    turns.acquire()
    assert turns.get_stats()["round_robin_index"] == 0


def test_a_balancer_prints_its_hierarchy_and_its_replicas() -> None:
    lb = LoadBalancer(["a"], [Says(None, "mine"), "requests"])
    assert repr(lb) == "LoadBalancer(mine > requests, ReplicaTable(#0 SERVING v0 inflight=0))"


# -- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_counts_where_it_is_more_than_was_counted_here() -> None:
    lb = LoadBalancer(list("ab"), "requests")
    lb.observe(0, pending_requests=10_000)
    assert [lb.acquire().index for _ in range(5)] == [1] * 5
    lb.observe(0, pending_requests=2)
    assert [lb.acquire().index for _ in range(3)] == [0] * 3  # those reported may be ours: loads 2, 2 and 3
    assert inflight(lb) == [3, 5]


def test_a_stale_report_counts_for_nothing_and_a_later_one_holds() -> None:
    clock = Clock()
    lb = LoadBalancer(list("ab"), "requests", clock=clock)
    lb.observe(0, pending_requests=50)
    clock.now = 4.0
    assert lb.select_actor() == 1
    lb.observe(0, pending_requests=40)
    clock.now = 8.0  # the first report is too old, the second is not
    assert lb.select_actor() == 1
    clock.now = 9.5
    assert lb.select_actor() == 0


def test_a_report_says_nothing_of_a_replica_that_started_over() -> None:
    lb = LoadBalancer(list("ab"), "requests")
    lb.observe(0, pending_requests=50, cache_usage=0.5)
    for state in (ReplicaState.DEAD, ReplicaState.STARTING, ReplicaState.SERVING):
        lb.replica_table.set_state(0, state)
    assert lb.select_actor() == 0
    assert lb.get_stats()["actor_stats"][0]["cache_usage"] is None


@pytest.mark.parametrize(
    ("stats", "match"),
    [
        ({"pending_requests": -1}, "pending_requests must be an integer from 0 to 2147483647, or None, got -1"),
        ({"cache_usage": 1.5}, r"cache_usage must be a finite number from 0 to 1, or None, got 1\.5"),
        ({"cache_usage": float("nan")}, "cache_usage must be a finite number from 0 to 1, or None, got nan"),
    ],
)
def test_a_report_out_of_range_is_refused(stats: dict[str, Any], match: str) -> None:
    lb = LoadBalancer(["a"])
    with pytest.raises(ValueError, match=match):
        lb.observe(0, **stats)
    with pytest.raises(IndexError, match="actor index 1 out of range"):
        lb.observe(1, pending_requests=1)


# -- groups -----------------------------------------------------------------------------------------------------------


def versions(lb: LoadBalancer, *numbers: int) -> None:
    for index, version in enumerate(numbers):
        lb.replica_table.set_version(index, version)


def test_a_group_stays_on_the_newest_version_that_served_when_it_began() -> None:
    lb = LoadBalancer(list("abcd"), "requests")
    versions(lb, 1, 2, 2, 1)
    assert {lease.version for lease in (lb.acquire(group_id="g") for _ in range(8))} == {2}
    assert inflight(lb) == [0, 4, 4, 0]
    lb.replica_table.set_version(0, 3)
    assert lb.acquire(group_id="g").version == 2
    assert lb.acquire(group_id="h").version == 3
    assert lb.acquire(group_id="g", min_version=2).version == 2


def test_another_balancer_of_the_same_replicas_keeps_a_groups_version() -> None:
    lb = LoadBalancer(list("ab"), "requests")
    versions(lb, 1, 0)
    lb.acquire(group_id="g")
    versions(lb, 1, 2)
    assert LoadBalancer(lb, "round-robin").acquire(group_id="g").version == 1


def test_a_group_whose_version_is_gone_is_told_so() -> None:
    lb = LoadBalancer(list("ab"), "requests")
    lb.acquire(group_id="g")
    versions(lb, 1, 1)
    with pytest.raises(
        StaleReplicaError, match=r"holds version 0, which group 'g' began on; the newest is 1\. Begin the"
    ):
        lb.acquire(group_id="g")
    lb.acquire(group_id="h")
    with pytest.raises(StaleReplicaError, match="group 'h' is on version 1, asked for 2"):
        lb.acquire(group_id="h", min_version=2)
    assert inflight(lb) == [1, 1]


def test_a_named_replica_settles_a_groups_version_and_keeps_to_it() -> None:
    lb = LoadBalancer(list("ab"), "requests")
    versions(lb, 0, 1)
    lb.acquire_at(0, group_id="g")
    assert lb.acquire(group_id="g").index == 0
    with pytest.raises(StaleReplicaError, match="replica 1 holds version 1, but group 'g' is on version 0"):
        lb.acquire_at(1, group_id="g")


def test_a_group_whose_requests_were_all_lost_begins_again_on_what_serves_then() -> None:
    lb = LoadBalancer(list("ab"), "requests")
    first, second = lb.acquire(group_id="g"), lb.acquire(group_id="g")
    for index in range(2):
        lb.replica_table.set_version(index, 1)
    first.release(False)
    with pytest.raises(StaleReplicaError, match="which group 'g' began on"):
        lb.acquire(group_id="g")  # the other may still come through
    second.release(None)
    assert lb.acquire(group_id="g").version == 1


def test_a_group_of_which_one_was_answered_keeps_its_version() -> None:
    lb = LoadBalancer(list("ab"), "requests")
    first, second = lb.acquire(group_id="g"), lb.acquire(group_id="g")
    for index in range(2):
        lb.replica_table.set_version(index, 1)
    first.release()
    second.release(False)
    with pytest.raises(StaleReplicaError, match="which group 'g' began on"):
        lb.acquire(group_id="g")


# -- churn ------------------------------------------------------------------------------------------------------------


def test_200_replicas_that_come_and_go_leave_no_counts_behind() -> None:
    rng = random.Random(0)
    lb = LoadBalancer(list(range(200)), ["session", "prefix-aware", "requests"])
    leases: list[Lease] = []
    for _ in range(4000):
        what, entry = rng.random(), lb.replica_table[rng.randrange(200)]
        if what < 0.6:
            leases.append(lb.acquire([rng.randrange(50)] * 40, session_id=rng.choice([None, f"{rng.randrange(60)}"])))
        elif what < 0.8 and leases:
            leases.pop(rng.randrange(len(leases))).release()
        elif what < 0.85 and leases:
            with pytest.raises(KeyError), leases.pop():
                raise KeyError
        elif what < 0.9:
            lb.replica_table.set_version(entry.index, entry.version + 1)
        else:
            lb.replica_table.set_state(entry.index, rng.choice(sorted(TRANSITIONS[entry.state], key=lambda s: s.name)))
    assert sum(inflight(lb)) == len(leases) > 500
    for lease in leases * 2:  # late, and twice; many of their replicas are gone
        lease.release()
    assert inflight(lb) == [0] * 200


# -- any sequence at all ----------------------------------------------------------------------------------------------


class Leasing(RuleBasedStateMachine):
    """Whatever is acquired, released (also twice) or changed: load is the number of leases held."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.lb = LoadBalancer(list("abc"), [Says(None), "requests"], clock=self.clock)
        self.held: dict[int, Lease] = {}
        self.given = 0

    def _keep(self, lease: Lease) -> Lease:
        self.held[id(lease)] = lease
        self.given += 1
        return lease

    @rule(target=leases, min_version=st.none() | st.integers(0, 3))
    def acquire(self, min_version: int | None) -> Any:
        fit = [
            e.index
            for e in self.lb.replica_table
            if e.state is ReplicaState.SERVING and e.version >= (min_version or 0)
        ]
        self.expire()
        least = min((self.lb.replica_table[i].load for i in fit), default=0)
        try:
            lease = self.lb.acquire(min_version=min_version)
        except (NoReplicaError, StaleReplicaError):
            assert not fit
            return None
        assert lease.index in fit
        assert self.lb.replica_table[lease.index].load in (least, least + 1)  # a report may hide one more
        return self._keep(lease)

    @rule(target=leases, index=st.integers(0, 2))
    def acquire_at(self, index: int) -> Any:
        try:
            return self._keep(self.lb.acquire_at(index))
        except NoReplicaError:
            assert self.lb.replica_table[index].state is not ReplicaState.SERVING
            return None

    @rule(lease=leases)
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.release()
            self.held.pop(id(lease), None)

    @rule(lease=consumes(leases))
    def use_as_context(self, lease: Lease | None) -> None:
        if lease is not None:
            with lease:
                pass
            self.held.pop(id(lease), None)

    @rule(index=st.integers(0, 2), data=st.data())
    def change_state(self, index: int, data: st.DataObject) -> None:
        allowed = sorted(TRANSITIONS[self.lb.replica_table[index].state], key=lambda state: state.name)
        self.lb.replica_table.set_state(index, data.draw(st.sampled_from(allowed)))

    @rule(index=st.integers(0, 2))
    def update_weights(self, index: int) -> None:
        self.lb.replica_table.set_version(index, self.lb.replica_table[index].version + 1)

    @rule(index=st.integers(0, 2), pending=st.integers(0, 5))
    def report(self, index: int, pending: int) -> None:
        self.lb.observe(index, pending_requests=pending)

    @rule(seconds=st.floats(0.0, 4.0))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    def expire(self) -> None:
        with self.lb.replica_table.changed:
            self.lb.replica_table.expire(self.clock.now - 5.0)

    @rule()
    def ask(self) -> None:
        serving = [e.index for e in self.lb.replica_table if e.state is ReplicaState.SERVING]
        if serving:
            assert self.lb.select_actor() in serving

    @invariant()
    def load_is_the_leases_held(self) -> None:
        expected = [0, 0, 0]
        for lease in self.held.values():
            expected[lease.index] += 1
        assert inflight(self.lb) == expected

    @invariant()
    def totals_are_the_sums_of_loads(self) -> None:
        with self.lb.replica_table.changed:
            serving = self.lb.replica_table.serving()
            assert serving.total == sum(entry.load for entry in serving)
            assert {entry.state for entry in serving} <= {ReplicaState.SERVING}

    @invariant()
    def decisions_are_the_leases_given(self) -> None:
        assert sum(stats["decisions"] for stats in self.lb.get_stats()["actor_stats"]) == self.given


def test_load_equals_the_leases_held_after_any_sequence() -> None:
    run_state_machine_as_test(Leasing, settings=settings(max_examples=60, stateful_step_count=40))
