"""A fleet of fake replicas: commands to all of them, more and fewer of them, stats, and the end."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from support.services import HOUR, QUICK, ask, slow_if, until_running
from support.waiting import in_thread, until
from torchrl_moe.errors import EngineError, GenerationTimeout, NoReplicaError, ReplicaDiedError
from torchrl_moe.modules.serving.candidates import Recovery, ReplicaState
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import FakeReplica
from torchrl_moe.testing.fake_weights import FakeFleet

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


# -- commands to all replicas -----------------------------------------------------------------------------------------


def test_pause_keep_freezes_and_resume_continues(serve: Any) -> None:
    engine = serve(2, token_seconds=0.001)
    call = in_thread(lambda: ask(engine, ["a", "b"], max_tokens=500))
    until_running(engine, [1, 1])
    engine.pause()
    time.sleep(0.7)
    assert not call.done()
    engine.resume()
    assert [completion.outputs[0].finish_reason for completion in call.result(60.0)] == ["length", "length"]


def test_pause_wait_lets_requests_finish_and_holds_new_ones(serve: Any) -> None:
    engine = serve(2, token_seconds=0.01)
    call = in_thread(lambda: ask(engine, ["a", "b"]))
    until_running(engine, [1, 1])
    engine.pause("wait")
    assert [completion.outputs[0].finish_reason for completion in call.result(60.0)] == ["length", "length"]
    with pytest.raises(GenerationTimeout):
        ask(engine, timeout_seconds=0.1)
    engine.resume()
    ask(engine)


def test_pause_abort_cuts_requests_short(serve: Any) -> None:
    engine = serve(2, token_seconds=HOUR)
    call = in_thread(lambda: ask(engine, ["a", "b"]))
    until_running(engine, [1, 1])
    engine.pause("abort", clear_cache=True)
    assert [completion.aborted for completion in call.result(60.0)] == [True, True]
    engine.resume()


def test_requests_that_come_while_the_engines_sleep_wait_until_they_wake_up(serve: Any) -> None:
    engine = serve(2, token_seconds=0.01)
    running = in_thread(lambda: ask(engine, ["a", "b"]))
    until_running(engine, [1, 1])
    engine.sleep()
    assert [completion.outputs[0].finish_reason for completion in running.result(60.0)] == ["length", "length"]
    call = in_thread(lambda: ask(engine, ["a", "b"]))
    until_running(engine, [1, 1])
    for command in (engine.pause, engine.resume):
        with pytest.raises(RuntimeError, match=r"the engines sleep; wake_up\(\) first"):
            command()
    engine.wake_up(["weights"])
    assert not call.done()
    engine.wake_up()
    assert [completion.outputs[0].finish_reason for completion in call.result(60.0)] == ["length", "length"]
    engine.wake_up()


def test_engines_that_were_paused_before_they_slept_are_paused_afterwards(serve: Any) -> None:
    engine = serve(2)
    engine.pause()
    engine.sleep()
    engine.wake_up()
    with pytest.raises(GenerationTimeout):
        ask(engine, timeout_seconds=0.1)
    engine.resume()
    ask(engine)


def test_a_sleep_that_failed_on_one_replica_is_taken_back_on_the_others(serve: Any) -> None:
    engine = serve(2)

    def fail(timeout: float, **arguments: Any) -> None:
        raise EngineError("memory usage increased")

    engine.replicas[1].overrides["sleep"] = fail
    with pytest.raises(EngineError, match="memory usage increased"):
        engine.sleep()
    assert len(ask(engine, ["a", "b"], timeout_seconds=60.0)) == 2
    engine.replicas[1].overrides.clear()
    engine.sleep(2)
    with pytest.raises(EngineError, match="has dropped the weights; update them first"):
        engine.wake_up()
    with pytest.raises(RuntimeError, match="the engines sleep"):
        engine.resume()
    with pytest.raises(ValueError, match="mode must be 'keep', 'wait' or 'abort', got 'deep'"):
        engine.sleep(1, "deep")


@pytest.mark.parametrize("level", [1, 2])
def test_a_replica_that_is_restarted_meanwhile_sleeps_too_and_keeps_its_weights(fleet: Any, level: int) -> None:
    service = fleet(2)
    service.sleep(level)
    for replica in (entry.replica for entry in service.replica_table):  # an update has come meanwhile
        replica._wake_up(["weights"])
        replica._weights_lost = False
    service.kill(0)
    until(lambda: service.restarts == [1, 0] and service.replica_table[0].replica._asleep)
    service.wake_up()
    assert ask(service, actor_index=0, timeout_seconds=60.0).metrics.replica == 0


def test_a_replica_that_is_restarted_meanwhile_comes_back_paused(fleet: Any) -> None:
    service = fleet(2)
    service.pause()
    service.kill(0)
    until(lambda: service.restarts == [1, 0] and service.replica_table[0].replica._paused)
    call = in_thread(lambda: ask(service, actor_index=0))
    time.sleep(0.05)
    assert not call.done()
    service.resume()
    assert call.result(60.0).metrics.replica == 0
    service.kill(0)
    until(lambda: service.restarts == [2, 0] and service.states == ["SERVING", "SERVING"])
    assert len(ask(service, ["a", "b"], timeout_seconds=5.0)) == 2


def test_a_pause_that_failed_does_not_hold_what_is_restarted(fleet: Any) -> None:
    service = fleet(1, lambda i, n: FakeReplica(i, token_seconds=0.0 if n else HOUR))
    call = in_thread(lambda: ask(service))
    until_running(service, [1])
    with pytest.raises(EngineError, match="was not idle"):
        service.pause("wait", timeout_seconds=0.05)
    service.kill(0)
    assert call.result(60.0).metrics.replica == 0


def test_a_pause_that_failed_on_one_replica_is_taken_back_on_the_others(serve: Any) -> None:
    engine = serve(2)

    def die(timeout: float, **arguments: Any) -> None:
        until(lambda: engine.replicas[1]._paused)
        engine.replicas[0].die()
        raise ReplicaDiedError("died under it")

    engine.replicas[0].overrides["pause"] = die
    with pytest.raises(ReplicaDiedError, match="died under it"):
        engine.pause()
    assert ask(engine, timeout_seconds=5.0).metrics.replica == 1


def test_a_second_pause_that_failed_leaves_the_first(serve: Any) -> None:
    engine = serve(1, token_seconds=HOUR)
    call = in_thread(lambda: ask(engine, request_ids="x"))
    until_running(engine, [1])
    engine.pause()
    with pytest.raises(EngineError, match="was not idle"):
        engine.pause("wait", timeout_seconds=0.05)
    assert engine.replicas[0]._paused
    engine.abort("x")
    call.result(60.0)
    engine.resume()


def test_an_unknown_way_to_pause_is_refused(serve: Any) -> None:
    with pytest.raises(ValueError, match="mode must be 'keep', 'wait' or 'abort', got 'drop'"):
        serve().pause("drop")


def test_pause_has_a_deadline_after_which_new_requests_are_taken_again(serve: Any) -> None:
    engine = serve(1, token_seconds=slow_if("slow"))
    call = in_thread(lambda: ask(engine, "slow", request_ids="x"))
    until_running(engine, [1])
    with pytest.raises(EngineError, match=r"replica 0 was not idle within 0\.1 s"):
        engine.pause("wait", timeout_seconds=0.1)
    assert ask(engine, "quick", timeout_seconds=5.0).prompt == "quick"
    engine.abort("x")
    call.result(60.0)


def test_commands_run_on_all_replicas_at_the_same_time_and_answer_in_order(serve: Any) -> None:
    engine = serve(3)
    barrier = threading.Barrier(3, timeout=60.0)
    for replica in engine.replicas:
        replica.overrides["collective_rpc"] = lambda timeout, method, args, kwargs, index=replica.index: (
            barrier.wait(),
            [index, method, args, kwargs, timeout],
        )[1]
    assert engine.collective_rpc("do", 7.0) == [[i, "do", (), None, 7.0] for i in range(3)]


def test_collective_rpc_passes_plain_data_on(serve: Any) -> None:
    engine = serve(2)
    heard: list[Any] = []
    for replica in engine.replicas:
        replica.overrides["collective_rpc"] = lambda timeout, **arguments: heard.append((timeout, arguments)) or ["ok"]
    assert engine.collective_rpc("method", 3.0, [1, 2], {"k": 3}) == [["ok"], ["ok"]]
    assert heard == [(3.0, {"method": "method", "args": [1, 2], "kwargs": {"k": 3}})] * 2
    engine.collective_rpc("method")
    assert heard[2] == (60.0, {"method": "method", "args": (), "kwargs": None})


def test_a_command_that_fails_on_one_replica_is_an_error(serve: Any) -> None:
    with pytest.raises(EngineError, match="the fake engine has no verb 'collective_rpc'"):
        serve(2).collective_rpc("method")


def test_commands_go_round_dead_replicas(serve: Any) -> None:
    engine = serve(2)
    engine.replicas[0].die()
    engine.pause()
    engine.resume()
    assert engine.reset_prefix_cache() is True
    assert engine.get_tokenizer().encode("a") == [97]
    assert engine.replica_table[0].state is ReplicaState.DEAD


def test_commands_go_round_replicas_that_only_start(serve: Any) -> None:
    engine = serve(2)
    engine.replicas[0].die()
    engine.replica_table.mark_dead(0)
    engine.replica_table.replace(0, FakeReplica(0, start_seconds=3600.0))
    engine.pause()
    engine.resume()
    for replica in (engine.replicas[0], engine.replica_table[0].replica):
        replica.overrides["stats"] = lambda timeout: pytest.fail("asked")
    assert math.isnan(engine.get_cache_usage()[0])
    assert math.isnan(engine.get_cache_usage(0))
    assert [row["state"] for row in engine.stats()] == ["STARTING", "SERVING"]
    engine.replicas[1].die()
    engine.replica_table.set_recovery(0, Recovery.SUPERVISOR)
    with pytest.raises(NoReplicaError, match=r"no replica is alive: .*#0 STARTING.*Wait for their restart"):
        engine.pause()


def test_a_death_under_a_command_is_noted(serve: Any) -> None:
    engine = serve(2)

    def die(timeout: float) -> None:
        engine.replicas[0].die()
        raise ReplicaDiedError("died under it")

    engine.replicas[0].overrides["resume"] = die
    with pytest.raises(ReplicaDiedError, match="died under it"):
        engine.resume()
    assert [entry.state.name for entry in engine.replica_table] == ["DEAD", "SERVING"]


def test_the_prefix_cache_cannot_be_reset_under_requests(serve: Any) -> None:
    engine = serve(2, token_seconds=HOUR)
    assert engine.reset_prefix_cache() is True
    call = in_thread(lambda: ask(engine, request_ids="x"))
    until_running(engine, [1, 0])
    assert engine.reset_prefix_cache() is False
    engine.abort("x")
    call.result(60.0)


# -- stats ----------------------------------------------------------------------------------------------------------


def test_it_is_ready_while_a_replica_serves(serve: Any) -> None:
    engine = serve(2)
    assert engine.ready()
    engine.replica_table.mark_dead(0)
    assert engine.ready()
    engine.replica_table.mark_dead(1)
    assert not engine.ready()
    engine.shutdown()
    assert not engine.ready()


def test_unfinished_requests_are_counted_per_replica(serve: Any) -> None:
    engine = serve(2, token_seconds=HOUR)
    call = in_thread(lambda: ask(engine, list("abc"), request_ids=list("abc")))
    until_running(engine, [2, 1])
    assert engine.get_num_unfinished_requests() == [2, 1]
    assert [engine.get_num_unfinished_requests(i) for i in range(2)] == [2, 1]
    engine.abort(["a", "b", "c"])
    call.result(60.0)
    assert engine.get_num_unfinished_requests() == [0, 0]


@pytest.mark.parametrize("name", ["get_num_unfinished_requests", "get_cache_usage"])
@pytest.mark.parametrize("index", [2, -1])
def test_stats_of_a_replica_that_does_not_exist_are_an_index_error(serve: Any, name: str, index: int) -> None:
    with pytest.raises(IndexError, match=rf"actor index {index} out of range \[0, 2\)"):
        getattr(serve(2), name)(index)


def test_cache_usage_is_the_engines_figure_and_nan_for_the_dead(serve: Any) -> None:
    engine = serve(2)
    assert engine.get_cache_usage() == [0.0, 0.0]
    assert engine.get_cache_usage(1) == 0.0
    engine.replicas[0].die()
    dead, alive = engine.get_cache_usage()
    assert math.isnan(dead)
    assert alive == 0.0
    assert math.isnan(engine.get_cache_usage(0))


# -- life -------------------------------------------------------------------------------------------------------------


def test_shutdown_is_idempotent_and_may_come_from_many_threads() -> None:
    engine = FakeAsyncVLLM(3)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: engine.shutdown(), range(8)))
    engine.shutdown()
    assert [entry.state.name for entry in engine.replica_table] == ["DEAD"] * 3
    assert [replica.is_alive() for replica in engine.replicas] == [False] * 3


def test_a_service_that_was_never_started_can_be_shut_down() -> None:
    service = GenerationService([FakeReplica()])
    service.shutdown()
    assert not service.is_running


def test_one_replica_that_fails_to_end_does_not_keep_the_others() -> None:
    engine = FakeAsyncVLLM(3)

    def fail() -> None:
        raise OSError("stuck")

    engine.replicas[0].shutdown = fail
    with pytest.raises(OSError, match="stuck"):
        engine.shutdown()
    assert [replica.is_alive() for replica in engine.replicas] == [True, False, False]


def test_a_service_as_a_context_ends_with_it_whatever_happens() -> None:
    with pytest.raises(KeyError), FakeAsyncVLLM() as engine:
        assert engine.is_running
        raise KeyError
    assert not engine.is_running


# -- more and fewer replicas ------------------------------------------------------------------------------------------


def test_replicas_are_added_and_take_requests(fleet: Any) -> None:
    service = fleet(1, lambda index, _: FakeReplica(index, token_seconds=0.0005))
    assert service.add_replicas(2) == [1, 2]
    assert service.num_replicas == 3
    assert service.states == ["SERVING"] * 3
    assert {completion.metrics.replica for completion in ask(service, list("abcdef"))} == {0, 1, 2}
    service.kill(2)
    until(lambda: service.restarts == [0, 0, 1] and service.states[2] == "SERVING")


def test_one_that_is_added_has_the_weights_of_the_others_before_it_serves(fleet: Any) -> None:
    service = fleet(1)
    brought: list[tuple[int, str]] = []

    def bring(index: int) -> None:
        brought.append((index, service.replica_table[index].state.name))
        service.replica_table.set_version(index, 3)
        service.replica_table.set_state(index, ReplicaState.SERVING)

    service.register_weight_sync(bring)
    service.replica_table.set_version(0, 3)
    assert service.add_replicas() == [1]
    assert brought == [(1, "STARTING")]
    assert [row["version"] for row in service.stats()] == [3, 3]


def test_one_that_is_added_to_a_paused_service_is_paused(fleet: Any) -> None:
    service = fleet(1)
    service.pause()
    service.add_replicas()
    call = in_thread(lambda: ask(service, actor_index=1))
    until(lambda: service.replica_table[1].inflight == 1)
    service.resume()
    assert call.result(60.0).metrics.replica == 1


def test_one_that_needs_weights_that_nobody_brings_waits_for_the_next_update(fleet: Any) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 3)
    assert service.add_replicas() == [1]
    assert (service.states, service.replica_table[1].recovery) == (["SERVING", "STARTING"], Recovery.UPDATE)


def test_more_requests_run_at_a_time_with_more_replicas_unless_the_user_said_how_many(fleet: Any) -> None:
    service, limited = fleet(1), fleet(1, max_concurrent_requests=7)
    service.add_replicas()
    limited.add_replicas()
    until(lambda: service.admission.limit == 2048)
    service.remove_replica(0)
    until(lambda: service.admission.limit == 1024)
    assert limited.admission.limit == 7


def test_replicas_that_do_not_come_up_are_not_added(fleet: Any) -> None:
    service = fleet(1, lambda index, _: FakeReplica(index, fail_start="no memory" if index == 2 else ""))
    with pytest.raises(ReplicaDiedError, match="replica 2 died: no memory"):
        service.add_replicas(2)
    assert (service.num_replicas, service.states) == (1, ["SERVING"])
    assert not any(line[0].is_alive() for line in service.made[1:])
    assert service.add_replicas(timeout_seconds=60.0) == [3]  # no index is used twice


def test_a_fake_engine_grows_too(serve: Any) -> None:
    engine = serve(1)
    assert engine.add_replicas(2) == [1, 2]
    assert [replica.index for replica in engine.replicas] == [0, 1, 2]
    assert ask(engine, actor_index=2).metrics.replica == 2


def test_a_service_that_was_given_its_replicas_can_add_none(fleet: Any) -> None:
    with FakeFleet(1) as given, pytest.raises(RuntimeError, match="cannot make replicas"):
        given.add_replicas()
    with pytest.raises(ValueError, match="count must be an integer from 1 to 1024, got 0"):
        fleet().add_replicas(0)


def test_a_replica_finishes_what_it_has_before_it_is_removed(fleet: Any) -> None:
    service = fleet(2, lambda index, _: FakeReplica(index, token_seconds=0.05))
    call = in_thread(lambda: ask(service, actor_index=1))
    until(lambda: service.replica_table[1].inflight == 1)
    service.remove_replica(1)
    assert call.result(60.0).outputs[0].finish_reason == "length"
    assert [row["replica"] for row in service.stats()] == [0]
    assert (service.num_replicas, service.restarts) == (1, [0])
    assert not service.made[1][0].is_alive()
    assert len(service.made[1]) == 1  # nobody restarts it
    assert {completion.metrics.replica for completion in ask(service, list("abc"))} == {0}
    with pytest.raises(ReplicaDiedError, match="replica 1, which actor_index names, is dead: it was removed"):
        ask(service, actor_index=1)
    assert "1 replica)" in repr(service)


def test_without_a_drain_its_requests_begin_again_on_the_others(fleet: Any) -> None:
    service = fleet(2, lambda index, _: FakeReplica(index, token_seconds=HOUR if index else 0.0))
    call = in_thread(lambda: ask(service, ["a", "b"]))
    until(lambda: service.replica_table[1].inflight == 1)
    service.remove_replica(1, drain=False)
    assert [completion.metrics.replica for completion in call.result(60.0)] == [0, 0]
    assert service.metrics.summary()["retried"] == 1


def test_one_whose_requests_take_too_long_serves_on(fleet: Any) -> None:
    service = fleet(2, lambda index, _: FakeReplica(index, token_seconds=HOUR))
    call = in_thread(lambda: ask(service, actor_index=1, request_ids="x"))
    until(lambda: service.replica_table[1].inflight == 1)
    with pytest.raises(
        EngineError, match=r"1 requests of replica 1 were not finished within 0\.05 s; it keeps serving"
    ):
        service.remove_replica(1, timeout_seconds=0.05)
    assert service.states == ["SERVING"] * 2
    assert service.replica_table[1].recovery is Recovery.SUPERVISOR
    service.abort("x")
    assert call.result(60.0).aborted


def test_what_cannot_be_removed_is_said(fleet: Any) -> None:
    service = fleet(2)
    with pytest.raises(IndexError, match="actor index 2 out of range"):
        service.remove_replica(2)
    service.remove_replica(0)
    with pytest.raises(ValueError, match="replica 0 was removed already"):
        service.remove_replica(0)
    with pytest.raises(ValueError, match="at least one replica"):
        service.remove_replica(1)


def test_of_two_who_remove_the_last_two_replicas_one_is_refused(fleet: Any) -> None:
    service = fleet(2, lambda index, _: FakeReplica(index, token_seconds=HOUR))
    calls = [in_thread(lambda i=i: ask(service, actor_index=i, request_ids=f"{i}")) for i in range(2)]
    until(lambda: [entry.inflight for entry in service.replica_table] == [1, 1])
    removing = in_thread(lambda: service.remove_replica(0))
    until(lambda: service.replica_table[0].leaving)
    with pytest.raises(ValueError, match="at least one replica"):
        service.remove_replica(1)
    with pytest.raises(ValueError, match="removed already"):
        service.remove_replica(0)
    service.abort(["0", "1"])
    removing.result(60.0)
    assert [call.result(60.0).aborted for call in calls] == [True, True]
    assert service.num_replicas == 1


def test_two_who_add_at_once_get_replicas_of_their_own(fleet: Any) -> None:
    service = fleet(1, lambda index, _: FakeReplica(index, start_seconds=0.2 if index else 0.0))
    adding = [in_thread(lambda: service.add_replicas(2)) for _ in range(2)]
    assert sorted(index for call in adding for index in call.result(60.0)) == [1, 2, 3, 4]
    assert [(entry.index, entry.replica.index) for entry in service.replica_table] == [(i, i) for i in range(5)]


def test_a_replica_takes_nothing_new_while_it_is_drained_whatever_an_update_does(fleet: Any) -> None:
    service = fleet(2, lambda index, _: FakeReplica(index, token_seconds=HOUR))
    call = in_thread(lambda: ask(service, actor_index=1, request_ids="x"))
    until(lambda: service.replica_table[1].inflight == 1)
    removing = in_thread(lambda: service.remove_replica(1))
    until(lambda: service.replica_table[1].leaving)
    for state in (ReplicaState.SYNCING, ReplicaState.SERVING):
        service.replica_table.set_state(1, state)
    assert {service.load_balancer.acquire().index for _ in range(4)} == {0}
    with pytest.raises(NoReplicaError, match="replica 1 is being removed"):
        ask(service, actor_index=1, timeout_seconds=0.1)
    for entry in service.replica_table:
        while entry.inflight > (entry.index == 1):
            service.replica_table.give_back(entry.index)
    service.abort("x")
    assert call.result(60.0).aborted
    removing.result(60.0)


def test_an_interrupted_removal_is_taken_back(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = fleet(2)

    def interrupted(*arguments: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(service._fleet, "_is_idle", interrupted)
        service.remove_replica(1)
    assert ask(service, actor_index=1).metrics.replica == 1
    service.kill(1)
    until(lambda: service.restarts == [0, 1] and service.states[1] == "SERVING")


def test_a_shutdown_ends_those_that_are_being_added(fleet: Any) -> None:
    service = fleet(1, lambda index, _: FakeReplica(index, start_seconds=HOUR if index else 0.0))
    adding = in_thread(lambda: service.add_replicas(2, timeout_seconds=HOUR))
    until(lambda: service.num_replicas == 3)
    service.shutdown()
    with pytest.raises(EngineError):
        adding.result(60.0)
    assert not any(line[0].is_alive() for line in service.made)


def test_removals_do_not_count_as_deaths_under_a_request(fleet: Any) -> None:
    service = fleet(
        2, lambda index, _: FakeReplica(index, token_seconds=HOUR if index else 0.0), replace(QUICK, attempts=1)
    )
    service.replica_table.touch(0)
    call = in_thread(lambda: ask(service))
    until(lambda: service.replica_table[1].inflight == 1)
    service.remove_replica(1, drain=False)
    assert call.result(60.0).metrics.replica == 0


def test_without_a_supervisor_nobody_waits_for_an_added_replica_that_died(serve: Any) -> None:
    engine = serve(1)
    engine.add_replicas()
    for replica in engine.replicas:
        replica.die()
    with pytest.raises(NoReplicaError):
        ask(engine)
