"""A fleet of replicas: commands to all, more and fewer of them, what died or stalls comes back, probes, the end."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from support.replicas import ScriptedReplica
from support.services import HOUR, QUICK, RestartingService, ask, listening, slow_if, until_running
from support.waiting import PATIENCE, in_thread, until
from torchrl_moe.errors import EngineError, NoReplicaError, ReplicaDiedError, WeightSyncError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import ProbeReport
from torchrl_moe.modules.serving import fleet as fleet_module
from torchrl_moe.modules.serving.fleet import ProbeHistory
from torchrl_moe.modules.serving.replica_table import FaultPolicy, Recovery, ReplicaState
from torchrl_moe.testing.fake_engine import FakeReplica
from torchrl_moe.testing.fake_weights import FakeFleet

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def until_serving(service: RestartingService, restarts: list[int]) -> None:
    until(lambda: service.states == ["SERVING"] * len(restarts) and service.restarts == restarts)


def serve_version(service: RestartingService, version: int) -> Callable[[int], None]:
    def bring(index: int) -> None:
        service.replica_table.set_version(index, version)
        service.replica_table.set_state(index, ReplicaState.SERVING)

    return bring


@pytest.mark.parametrize("first", [["weights"], None])
@pytest.mark.parametrize("last", [["kv_cache"], ["weights", "kv_cache"], None])
def test_requests_that_come_while_the_engines_sleep_wait_until_they_wake_up(serve: Any, first: Any, last: Any) -> None:
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
    if first is not None:
        engine.wake_up(first)
        assert not call.done()
        with pytest.raises(RuntimeError, match="the engines sleep"):
            engine.pause()
    engine.wake_up(last)
    assert [replica._asleep for replica in engine.replicas] == [set(), set()]
    assert [completion.outputs[0].finish_reason for completion in call.result(60.0)] == ["length", "length"]
    engine.wake_up()


def test_a_sleep_that_failed_on_one_replica_is_taken_back_on_the_others(serve: Any) -> None:
    engine = serve(2)
    engine.replicas[1].overrides["sleep"] = Mock(side_effect=EngineError("memory usage increased"))
    with pytest.raises(EngineError, match="memory usage increased"):
        engine.sleep()
    assert len(ask(engine, ["a", "b"], timeout_seconds=60.0)) == 2
    engine.replicas[1].overrides.clear()
    engine.sleep(2)
    with pytest.raises(EngineError, match="has dropped the weights; update them first"):
        engine.wake_up()
    with pytest.raises(RuntimeError, match="the engines sleep"):
        engine.resume()


def test_one_that_is_restarted_when_the_weights_are_awake_wakes_up_with_the_others(fleet: Any) -> None:
    service = fleet(2)
    service.sleep()
    service.wake_up(["weights"])
    service.kill(0)
    until(lambda: service.restarts == [1, 0] and service.replica_table[0].replica._asleep)
    service.wake_up(["kv_cache"])
    assert ask(service, actor_index=0, timeout_seconds=60.0).metrics.replica == 0


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


def test_a_pause_has_a_deadline_after_which_requests_are_taken_again_by_what_is_restarted_too(fleet: Any) -> None:
    service = fleet(1, lambda i, n: FakeReplica(i, token_seconds=0.0 if n else slow_if("slow")))
    call = in_thread(lambda: ask(service, "slow"))
    until_running(service, [1])
    with pytest.raises(EngineError, match=r"replica 0 was not idle within 0\.05 s"):
        service.pause("wait", timeout_seconds=0.05)
    assert ask(service, "quick", timeout_seconds=60.0).prompt == "quick"
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


def test_commands_run_on_all_replicas_at_the_same_time_and_answer_in_order(serve: Any) -> None:
    engine, barrier = serve(3), threading.Barrier(3, timeout=60.0)

    def meet_and_answer(index: int, *given: Any, **named: Any) -> Any:
        barrier.wait()
        return index, given, named

    for i, replica in enumerate(engine.replicas):
        replica.overrides["collective_rpc"] = functools.partial(meet_and_answer, i)
    asked = {"method": "do", "args": (), "kwargs": None}
    assert engine.collective_rpc("do", 7.0) == [(i, (7.0,), asked) for i in range(3)]


def test_it_is_ready_while_a_replica_serves_and_may_be_shut_down_by_many_threads(serve: Any) -> None:
    engine = serve(2)
    for index in (0, 1):
        assert engine.ready()
        engine.replica_table.mark_dead(index)
    assert not engine.ready()
    engine = serve(3)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: engine.shutdown(), range(8)))
    assert not engine.ready()
    assert [entry.state.name for entry in engine.replica_table] == ["DEAD"] * 3
    assert [replica.is_alive() for replica in engine.replicas] == [False] * 3


# -- more and fewer replicas ------------------------------------------------------------------------------------------


def test_replicas_are_added_and_take_requests_of_which_more_run_at_a_time(fleet: Any) -> None:
    service = fleet(1, lambda index, _: FakeReplica(index, token_seconds=0.0005))
    assert service.add_replicas(2) == [1, 2]
    assert (service.num_replicas, service.states) == (3, ["SERVING"] * 3)
    assert {completion.metrics.replica for completion in ask(service, list("abcdef"))} == {0, 1, 2}
    service.kill(2)
    until_serving(service, [0, 0, 1])
    assert service.admission.limit == 3 * 1024
    service.remove_replica(0)
    assert service.admission.limit == 2 * 1024
    limited = fleet(1, max_concurrent_requests=7)  # as the user said
    limited.add_replicas()
    assert limited.admission.limit == 7


def test_one_that_is_added_has_the_weights_of_the_others_before_it_serves(fleet: Any) -> None:
    service = fleet(1)
    brought: list[tuple[int, str]] = []

    def bring(index: int) -> None:
        brought.append((index, service.states[index]))
        serve_version(service, 3)(index)

    service.register_weight_sync(bring)
    service.replica_table.set_version(0, 3)
    assert service.add_replicas() == [1]
    assert brought == [(1, "STARTING")]
    assert [row["version"] for row in service.stats()] == [3, 3]


def test_replicas_that_do_not_come_up_are_not_added(fleet: Any) -> None:
    service = fleet(1, lambda index, _: FakeReplica(index, fail_start="no memory" if index == 2 else ""))
    with pytest.raises(ReplicaDiedError, match="replica 2 died: no memory"):
        service.add_replicas(2)
    assert (service.num_replicas, service.states) == (1, ["SERVING"])
    assert not any(line[0].is_alive() for line in service.made[1:])
    assert service.add_replicas(timeout_seconds=60.0) == [3]  # no index is used twice
    with FakeFleet(1) as given, pytest.raises(RuntimeError, match="cannot make replicas"):
        given.add_replicas()


def test_a_replica_finishes_what_it_has_before_it_is_removed(fleet: Any) -> None:
    service = fleet(2, lambda index, _: FakeReplica(index, token_seconds=0.05))
    call = in_thread(lambda: ask(service, actor_index=1))
    until(lambda: service.replica_table[1].inflight == 1)
    service.remove_replica(1)
    assert call.result(60.0).outputs[0].finish_reason == "length"
    assert [row["replica"] for row in service.stats()] == [0]
    assert (service.num_replicas, service.restarts) == (1, [0])
    assert [replica.is_alive() for replica in service.made[1]] == [False]  # nobody restarts it
    assert {completion.metrics.replica for completion in ask(service, list("abc"))} == {0}
    with pytest.raises(ReplicaDiedError, match="replica 1, which actor_index names, is dead: it was removed"):
        ask(service, actor_index=1)
    with pytest.raises(IndexError, match="actor index 2 out of range"):
        service.remove_replica(2)


def test_without_a_drain_its_requests_begin_again_on_the_others_as_if_none_had_died_under_them(fleet: Any) -> None:
    once = replace(QUICK, attempts=1)
    service = fleet(2, lambda index, _: FakeReplica(index, token_seconds=HOUR if index else 0.0), once)
    call = in_thread(lambda: ask(service, ["a", "b"]))
    until(lambda: service.replica_table[1].inflight == 1)
    service.remove_replica(1, drain=False)
    assert [completion.metrics.replica for completion in call.result(60.0)] == [0, 0]
    assert service.metrics.summary()["retried"] == 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_removal_that_takes_too_long_or_is_interrupted_is_taken_back(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    service = fleet(2, lambda index, number: FakeReplica(index, token_seconds=0.0 if number else slow_if("hi")))
    call = in_thread(lambda: ask(service, actor_index=1, request_ids="x"))
    until(lambda: service.replica_table[1].inflight == 1)
    if interrupted:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(service._fleet, "_is_idle", Mock(side_effect=KeyboardInterrupt()))
            service.remove_replica(1)
    else:
        with pytest.raises(EngineError, match=r"1 requests of replica 1 were not finished within 0\.05 s"):
            service.remove_replica(1, timeout_seconds=0.05)
    assert service.states == ["SERVING"] * 2
    assert ask(service, "a", actor_index=1).metrics.replica == 1
    service.abort("x")
    assert call.result(60.0).aborted
    service.kill(1)
    until_serving(service, [0, 1])


def test_a_replica_takes_nothing_new_while_it_is_drained_whatever_an_update_does(fleet: Any) -> None:
    service = fleet(2, lambda index, _: FakeReplica(index, token_seconds=HOUR))
    call = in_thread(lambda: ask(service, actor_index=1, request_ids="x"))
    until(lambda: service.replica_table[1].inflight == 1)
    removing = in_thread(lambda: service.remove_replica(1))
    until(lambda: service.replica_table[1].leaving)
    for state in (ReplicaState.SYNCING, ReplicaState.SERVING):
        service.replica_table.set_state(1, state)
    for _ in range(4):
        with service.load_balancer.acquire() as lease:
            assert lease.index == 0
    with pytest.raises(NoReplicaError, match="replica 1 is being removed"):
        ask(service, actor_index=1, timeout_seconds=0.1)
    for index, words in ((0, "at least one replica"), (1, "removed already")):
        with pytest.raises(ValueError, match=words):
            service.remove_replica(index)
    service.abort("x")
    assert call.result(60.0).aborted
    removing.result(60.0)
    assert service.num_replicas == 1
    assert service.add_replicas() == [2]
    assert service.set_seed(5) == 8  # 5 for replica 0, and 7 for replica 2


def test_a_shutdown_ends_those_that_are_being_added(fleet: Any) -> None:
    service = fleet(1, lambda index, _: FakeReplica(index, start_seconds=HOUR if index else 0.0))
    adding = in_thread(lambda: service.add_replicas(2, timeout_seconds=HOUR))
    until(lambda: service.num_replicas == 3)
    service.shutdown()
    with pytest.raises(EngineError):
        adding.result(60.0)
    assert not any(line[0].is_alive() for line in service.made)


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_death_under_a_request_is_noted_at_once(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "TICK_SECONDS", HOUR)
    service = fleet(1, lambda i, n: FakeReplica(i, die_under=lambda r: n == 0))
    assert ask(service, request_ids="x").prompt == "hi"
    assert service.restarts == [1]
    assert service.replica_table[0].last_error == "replica 0 died: under 'x'"


def broken(index: int, number: int) -> FakeReplica:
    """The first replica does not come up again."""
    return FakeReplica(index, fail_start="no memory" if index == 0 and number else "")


def test_one_that_does_not_come_up_is_tried_again_so_often_and_then_stays_dead(
    fleet: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[int] = []

    def at_once(policy: FaultPolicy, recent: int) -> float:
        delays.append(recent)
        return 0.0

    monkeypatch.setattr(FaultPolicy, "delay", at_once)
    service = fleet(2, broken, replace(QUICK, max_restarts=3))
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.NOBODY)
    assert (service.states, service.restarts, delays) == (["DEAD", "SERVING"], [3, 0], [0, 1, 2])
    given_up = "restarted 3 times within 300 s, and given up. The last error: replica 0 died: no memory"
    assert service.replica_table[0].last_error == given_up
    with pytest.raises(ReplicaDiedError, match="which actor_index names, is dead: restarted 3 times within 300 s"):
        ask(service, actor_index=0)
    assert ask(service).metrics.replica == 1
    assert caplog.messages[0] == "replica 0 died: killed"
    assert caplog.messages[-1].startswith(f"replica 0 is not restarted any more: {given_up}")


def test_restarts_of_long_ago_do_not_count(fleet: Any) -> None:
    service = fleet(1, faults=replace(QUICK, max_restarts=1, restart_window=0.05))
    for number in range(1, 4):
        service.kill(0)
        until_serving(service, [number])
        time.sleep(0.06)


def test_calls_end_at_once_when_the_last_hope_is_given_up(fleet: Any) -> None:
    service = fleet(1, broken, replace(QUICK, max_restarts=2))
    service.replica_table[0].replica.token_seconds = HOUR
    calls = [in_thread(lambda: ask(service)), in_thread(lambda: asyncio.run(service.agenerate("b")))]
    until(lambda: service.replica_table[0].inflight == 2)
    service.kill(0, "lightning")
    for call in calls:
        with pytest.raises(NoReplicaError, match=r"no replica is serving: .*had started on another .*: .*lightning"):
            call.result(60.0)
    with pytest.raises(NoReplicaError, match="Make a new service"):
        service.pause()


def test_what_another_driver_has_shut_down_stays_so(fleet: Any) -> None:
    service = fleet()
    service.replica_table[0].replica.was_ended = True
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.NOBODY)
    assert (service.states, service.restarts) == (["DEAD", "SERVING"], [0, 0])
    assert service.replica_table[0].last_error == "replica 0 was shut down by another driver"


def test_a_factory_that_fails_for_a_reason_of_its_own_is_the_end_and_says_so(
    fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service = fleet(1, lambda i, n: Mock(side_effect=KeyError("settings"))() if n else FakeReplica(i))
    service.kill(0)
    until(lambda: "the supervisor failed at replica 0, and goes on" in caplog.messages)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
    assert (service.states, service.replica_table[0].recovery) == (["DEAD"], Recovery.NOBODY)
    assert service.replica_table[0].last_error == "restarting failed with KeyError('settings')"


def test_a_system_without_room_for_a_thread_ends_no_restarts(fleet: Any) -> None:
    class Full(FakeReplica):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    service = fleet(1, lambda i, n: Full(i) if n == 1 else FakeReplica(i))
    service.kill(0)
    until_serving(service, [2])


def test_one_that_cannot_be_asked_keeps_no_other_from_being_watched_and_coming_back(fleet: Any) -> None:
    service, error = fleet(4), OSError("too many open files")
    silent = service.made[0][0]
    silent.is_alive = Mock(side_effect=error)
    try:
        service.kill(1)
        until_serving(service, [0, 1, 0, 0])
        expected = f"EngineError: replica 0 could not be asked whether it is alive: {error!r}"
        until(lambda: service._fleet.supervisor_error == expected)
    finally:
        del silent.is_alive
    until(lambda: [row["supervisor_error"] for row in service.stats()] == [None] * 4)
    service.made[2][0].ask = Mock(side_effect=error)
    service.made[3][0].stall()
    until_serving(service, [0, 1, 1, 1])  # the one that cannot even be probed gave no sign of life either


def test_the_supervisor_outlives_an_error_says_so_and_continues(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    service, start = fleet(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("torchrl_moe-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        service.kill(0)
        error = until(lambda: service.stats()[0]["supervisor_error"])  # at its first restart
        assert error == "NoThreadError: can't start new thread"
    until_serving(service, [1, 0])
    until(lambda: {row["supervisor_error"] for row in service.stats()} == {None})
    assert "the supervisor failed at replica 0, and goes on" in caplog.messages


def test_the_log_says_of_each_death_and_return_once(fleet: Any, caplog: pytest.LogCaptureFixture) -> None:
    service = fleet()
    service.kill(0, "out of memory\nits log")
    until_serving(service, [1, 0])
    service.replica_table.set_state(1, ReplicaState.SYNCING)
    service.replica_table.set_state(1, ReplicaState.QUARANTINED)
    until_serving(service, [1, 1])
    assert caplog.messages == [
        "replica 0 died: out of memory",
        "replica 0 serves again, after restart 1",
        "replica 1 is quarantined: an update left it with unknown weights",
        "replica 1 serves again, after restart 1",
    ]
    caplog.clear()
    service.shutdown()
    assert caplog.messages == []


# -- the current weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"), [(WeightSyncError("the store is busy"), "the store is busy"), (SystemExit("no store"), "")]
)
def test_it_serves_once_it_was_brought_to_the_newest_weights(fleet: Any, error: BaseException, words: str) -> None:
    service = fleet()
    service.replica_table.set_version(0, 7)
    asked: list[tuple[int, str]] = []

    def bring(index: int) -> None:
        asked.append((index, service.states[index]))
        if len(asked) < 3:
            raise error
        serve_version(service, 7)(index)

    service.register_weight_sync(bring)
    service.kill(0)
    until_serving(service, [1, 0])
    assert asked == [(0, "STARTING")] * 3
    assert service.replica_table[0].version == 7
    last_error = f"its weights could not be loaded: {words or f'it raised {error!r}'}"
    assert service.replica_table[0].last_error == last_error


def quarantined(service: RestartingService) -> None:
    service.replica_table.set_state(0, ReplicaState.QUARANTINED)
    raise RuntimeError("in the middle")


def quarantined_and_ended(service: RestartingService) -> None:
    service.replica_table.set_state(0, ReplicaState.QUARANTINED)
    service.replica_table[0].replica.shutdown()


def noted_as_dead_though_it_lives(service: RestartingService) -> None:
    service.replica_table.mark_dead(0)
    raise WeightSyncError("the replica is DEAD")


def died(service: RestartingService) -> None:
    service.kill(0, "in the middle")
    raise ReplicaDiedError("died")


@pytest.mark.parametrize("happens", [quarantined, quarantined_and_ended, noted_as_dead_though_it_lives, died])
def test_one_to_which_this_happens_while_it_is_brought_is_restarted(
    fleet: Any, happens: Callable[[RestartingService], None]
) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 2)

    def bring(index: int) -> None:
        if len(service.made[0]) == 2:
            happens(service)
        else:
            serve_version(service, 2)(index)

    service.register_weight_sync(bring)
    service.kill(0)
    until_serving(service, [2])
    assert not service.made[0][1].is_alive()


def test_without_a_registered_sync_it_waits_for_the_next_update(fleet: Any) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 3)
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.UPDATE)
    assert service.states == ["STARTING"]
    with pytest.raises(NoReplicaError):
        ask(service)  # for ever: the update may have to come from this very thread
    call = in_thread(lambda: ask(service, timeout_seconds=5.0))
    time.sleep(0.05)
    assert not call.done()
    serve_version(service, 4)(0)
    assert call.result(60.0).metrics.replica == 0
    assert service.replica_table[0].recovery is Recovery.SUPERVISOR


def test_one_that_waited_is_brought_once_a_sync_has_updated_the_others(
    fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service = fleet()
    service.replica_table.set_version(1, 3)
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.UPDATE)
    brought: list[int] = []

    def bring(index: int) -> None:
        brought.append(index)
        if service.restarts[0] < 2:  # one whose update fails for a reason that nobody expected is restarted
            raise KeyError("a bug")
        serve_version(service, 4)(index)

    service.register_weight_sync(bring)
    time.sleep(0.2)
    assert brought == []  # nothing newer was published: it may not have what the others have
    service.replica_table.set_version(1, 4)
    until_serving(service, [2, 0])
    assert brought == [0, 0]
    assert [entry.version for entry in service.replica_table] == [4, 4]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


def test_one_that_another_driver_may_have_updated_asks_the_others_before_it_serves(fleet: Any) -> None:
    service = fleet(4)
    silent, unsure, knowing = (line[0] for line in service.made[1:])
    silent.die()
    unsure.overrides["weights_version"] = lambda timeout: 0
    knowing.overrides["weights_version"] = lambda timeout: 5
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.UPDATE)
    assert (service.states[0], service.replica_table.latest_version) == ("STARTING", 5)
    assert 0 not in {completion.metrics.replica for completion in ask(service, list("abcd"))}
    serve_version(service, 6)(0)
    assert ask(service, actor_index=0, timeout_seconds=5.0).metrics.replica == 0


def test_what_another_driver_brings_is_heard_of_and_one_that_is_restarted_waits_for_it(fleet: Any) -> None:
    service = fleet(1)
    entry = service.replica_table[0]
    entry.replica.version = 57  # by another driver; the replica says so with its stats
    until(lambda: (entry.version, service.replica_table.latest_version) == (57, 57))
    service.kill(0)
    until(lambda: entry.recovery is Recovery.UPDATE)
    assert (service.states, entry.version) == (["STARTING"], 0)  # nobody is left who could be asked
    entry.replica.version = 56
    time.sleep(0.2)  # a few looks
    assert service.states == ["STARTING"]
    entry.replica.version = 57
    until_serving(service, [1])
    assert entry.version == 57
    assert ask(service, timeout_seconds=5.0).metrics.replica == 0


def test_in_a_paused_service_one_is_paused_before_it_takes_requests(fleet: Any) -> None:
    service = fleet(1)
    service.pause()
    entry, seen = service.replica_table[0], set()

    def note() -> None:
        if entry.restarts and entry.state is ReplicaState.SERVING:
            seen.add(entry.replica._paused)

    with listening(service.replica_table, note):
        service.kill(0)
        until(lambda: seen)
    assert seen == {True}
    service.resume()
    ask(service, timeout_seconds=5.0)


# -- stalls -----------------------------------------------------------------------------------------------------------


def test_a_request_that_stalls_its_replicas_fails_with_what_their_logs_say(fleet: Any) -> None:
    service = fleet(2, lambda i, n: FakeReplica(i, token_seconds=HOUR))
    call = in_thread(lambda: ask(service))
    for deaths in (1, 2):
        until(lambda: any(entry.inflight for entry in service.replica_table))
        (entry,) = [entry for entry in service.replica_table if entry.inflight]
        entry.replica.log_tail = lambda: "ValidationError: Expected `int`"
        entry.replica.stall()
        until(lambda deaths=deaths: sum(service.restarts) == deaths)
    with pytest.raises(
        ReplicaDiedError,
        match=r"(?s)2 replicas died under it\. The last one: .* gave no sign .*says:\nValidationError: Exp",
    ):
        call.result(PATIENCE)


@pytest.mark.parametrize("part", ["owner", "core"])
def test_a_stalled_replica_is_ended_and_its_requests_go_elsewhere(fleet: Any, part: str) -> None:
    service = fleet(
        2,
        lambda i, n: FakeReplica(i, token_seconds=HOUR if (i, n) == (0, 0) else 0.0),
        replace(QUICK, breaker_cooldown=HOUR),  # of the stalled one, not of what replaces it
    )
    call = in_thread(lambda: ask(service, actor_index=0))
    free = in_thread(lambda: ask(service, ["a", "b"]))
    until(lambda: service.replica_table[0].inflight == 2)
    stalled = service.made[0][0]
    if part == "owner":
        stalled.stall()
    else:
        stalled.probe_report = ProbeReport(core_answered=False, stopped=True)
    assert call.result(60.0).metrics.replica == 0
    assert len(free.result(60.0)) == 2
    assert not stalled.is_alive()
    assert service.restarts == [1, 0]
    assert service.replica_table[0].last_error == "replica 0 gave no sign of life in 0.1 s and was ended"


def test_a_slow_replica_is_not_ended_nor_one_in_sync_or_paused_or_that_knows_no_probes(fleet: Any) -> None:
    service = fleet(4, faults=replace(QUICK, slow_patience=HOUR))
    slow, syncing, paused, older = (line[0] for line in service.made)
    ticks = iter(range(1, 10**6))
    slow.overrides["probe"] = lambda *_, **__: ProbeReport(core_answered=False, cpu_seconds=float(next(ticks)))
    service.replica_table.set_state(1, ReplicaState.SYNCING)
    syncing.stall()
    paused.call(Engine.pause, 1.0, "keep", False)
    older.overrides["probe"] = Mock(side_effect=ValueError("no command 'probe'"))
    time.sleep(0.5)
    assert service.restarts == [0] * 4
    assert service.states == ["SERVING", "SYNCING", "SERVING", "SERVING"]
    assert not any(entry.breaker.blocks for entry in service.replica_table)


def test_one_that_is_doubted_is_probed_at_once_and_not_again_before_it_answered(fleet: Any) -> None:
    service = fleet(2, lambda i, n: ScriptedReplica(i), replace(QUICK, probe=HOUR, patience=2 * HOUR))
    replica, table = service.made[0][0], service.replica_table
    time.sleep(0.1)
    assert replica.asked("probe") == []
    replica.stall()
    for _ in range(2):
        table.doubt(0)
        until(lambda: not table.doubts and replica.asked("probe"))
    assert replica.asked("probe") == [HOUR / 2]  # half of the time is the core's


# -- health probes ----------------------------------------------------------------------------------------------------


WELL = ProbeReport(core_answered=True)
OWNER = None  # not even that of the core answers
CORE = ProbeReport(core_answered=False)
STOPPED = ProbeReport(core_answered=False, stopped=True)
BUSY = [ProbeReport(core_answered=False, cpu_seconds=0.5 * i) for i in range(1, 7)]  # a twentieth of one core
OTHERS = [ProbeReport(core_answered=False, cpu_seconds=10.0 * i, stopped=True) for i in range(1, 4)]
SILENT = "gave no sign of life in 30 s"


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        *(([one, one, WELL, one, one, one], [""] * 5 + [SILENT]) for one in (OWNER, CORE, STOPPED)),
        (BUSY, [""] * 4 + ["computed for 50 s without an answer", "computed for 60 s without an answer"]),
        ([*BUSY[:4], WELL, *BUSY[:4]], [""] * 9),
        (OTHERS, ["", "", SILENT]),  # what others compute is no life of a stopped process
        ([CORE, CORE, BUSY[0], CORE, CORE], [""] * 5),
    ],
)
def test_patience_ends_after_so_many_probes_without_a_sign_of_life(reports: list[Any], said: list[str]) -> None:
    history = ProbeHistory(FaultPolicy(probe=10.0, patience=30.0, slow_patience=50.0))
    assert [history.note(report) for report in reports] == said


def test_one_that_does_not_answer_gets_no_requests_and_is_left_alone_while_its_weights_are_replaced(fleet: Any) -> None:
    service = fleet(2, lambda i, n: ScriptedReplica(i), replace(QUICK, probe=0.2, patience=0.4))
    replica, table = service.made[0][0], service.replica_table
    replica.stall()
    until(lambda: table[0].last_error == "gave no sign of life to a health probe")
    assert [entry.index for entry in table.serving()] == [1]
    table.set_state(0, ReplicaState.SYNCING)
    before = len(replica.asked("probe"))
    time.sleep(0.5)
    assert len(replica.asked("probe")) == before
    table.set_state(0, ReplicaState.SERVING)  # the count begins again
    until(lambda: service.restarts == [1, 0])
    assert len(replica.asked("probe")) == before + 2


# -- the end ----------------------------------------------------------------------------------------------------------


def no_thread_restarts() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("torchrl_moe-restart")]


def test_shutdown_during_a_restart_leaves_nothing(fleet: Any) -> None:
    service = fleet(1, lambda i, n: FakeReplica(i, start_seconds=HOUR if n else 0.0), replace(QUICK, start=2 * HOUR))
    service.kill(0)
    until(lambda: service.restarts == [1])
    call = in_thread(lambda: ask(service))
    in_thread(service.shutdown).result(PATIENCE)
    with pytest.raises(EngineError):  # whichever comes first: no replica comes back, or the service was shut down
        call.result(60.0)
    until(no_thread_restarts)


def test_a_delay_without_end_starts_nothing_until_the_shutdown(fleet: Any) -> None:
    service = fleet(1, faults=replace(QUICK, first_delay=math.inf, longest_delay=math.inf))
    service.kill(0)
    until(lambda: service.states == ["DEAD"])
    time.sleep(0.2)
    assert service.replica_table[0].recovery is Recovery.SUPERVISOR
    service.shutdown()
    until(no_thread_restarts)
    assert len(service.made[0]) == 1


def test_a_replica_that_is_made_after_the_end_is_ended(fleet: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def make(index: int, number: int) -> FakeReplica:
        if number:
            begun.set()
            assert go_on.wait(PATIENCE)
        return FakeReplica(index)

    service = fleet(1, make)
    service.kill(0)
    assert begun.wait(PATIENCE)
    service.shutdown()  # which does not wait for long
    go_on.set()
    until(lambda: len(service.made[0]) == 2)
    until(lambda: not service.made[0][1].is_alive(), 10.0)


def test_a_replica_that_cannot_be_ended_does_not_keep_the_service_from_its_end(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.enumerate()  # other tests' services may live beside it
    service = fleet()
    loops = [one for one in threading.enumerate() if one.name == "torchrl_moe-service" and one not in before]
    assert len(loops) == 1
    with monkeypatch.context() as patch, pytest.raises(OSError, match="it does not end"):
        patch.setattr(service.made[0][0], "shutdown", Mock(side_effect=OSError("it does not end")))
        service.shutdown()
    assert not service.made[1][0].is_alive()
    until(lambda: not any(thread.is_alive() for thread in loops), 10.0)
    service.made[0][0].shutdown()


def test_a_sync_may_end_the_service(fleet: Any) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 7)
    service.register_weight_sync(lambda index: service.shutdown())
    service.kill(0)
    until(lambda: not service.is_running)
    until(no_thread_restarts)
    assert service.states == ["DEAD"]
