"""The supervisor: what died comes back, with the current weights, and not for ever; what stalls is ended."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from support.replicas import ScriptedReplica
from support.services import HOUR, QUICK, RestartingService, ask, listening
from support.waiting import PATIENCE, in_thread, until
from torchrl_moe.errors import EngineError, NoReplicaError, ReplicaDiedError, WeightSyncError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import ProbeReport
from torchrl_moe.modules.serving import fleet as fleet_module
from torchrl_moe.modules.serving.candidates import Recovery, ReplicaState
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import FakeReplica

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def until_serving(service: RestartingService, restarts: list[int]) -> None:
    until(lambda: service.states == ["SERVING"] * len(restarts) and service.restarts == restarts)


def test_a_dead_replica_comes_back_as_another_one(fleet: Any) -> None:
    service = fleet()
    service.kill(0, "out of memory")
    until_serving(service, [1, 0])
    assert service.replica_table[0].replica is service.made[0][1]
    assert "out of memory" not in repr(service)
    assert {completion.metrics.replica for completion in ask(service, list("abcd"))} == {0, 1}
    service.kill(0)
    until_serving(service, [2, 0])


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


def test_the_end_of_an_idle_replica_is_in_its_own_message(fleet: Any, serve: Any) -> None:
    service, unwatched = fleet(1), serve(2)
    service.kill(0, "out of memory")
    unwatched.replicas[1].die("out of disk")
    until_serving(service, [1])
    assert service.replica_table[0].last_error == "replica 0 died: out of memory"
    assert [row["last_error"] for row in unwatched.stats()] == [None, "replica 1 died: out of disk"]


def test_a_death_under_a_request_is_noted_at_once(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "TICK_SECONDS", HOUR)
    service = fleet(1, lambda i, n: FakeReplica(i, die_under=lambda r: n == 0))
    assert ask(service).prompt == "hi"
    assert service.restarts == [1]
    assert (
        service.replica_table[0].last_error == f"replica 0 died: under {service.made[0][0].submitted[0].request_id!r}"
    )


def test_a_quarantined_replica_is_ended_and_restarted(fleet: Any) -> None:
    service = fleet()
    service.replica_table.set_state(0, ReplicaState.SYNCING)
    service.replica_table.set_state(0, ReplicaState.QUARANTINED)
    until_serving(service, [1, 0])
    assert not service.made[0][0].is_alive()


def test_the_old_one_has_ended_before_the_new_one_is_made(fleet: Any) -> None:
    order: list[str] = []

    def end() -> None:
        time.sleep(0.05)
        order.append("ended")

    def make(index: int, number: int) -> FakeReplica:
        order.append("made")
        return ScriptedReplica(index, script={"shutdown": end})

    service = fleet(1, make)
    service.kill(0)
    until_serving(service, [1])
    assert order[:3] == ["made", "ended", "made"]


# -- not for ever -----------------------------------------------------------------------------------------------------


def broken_after(number: int) -> Callable[[int, int], FakeReplica]:
    return lambda i, n: FakeReplica(i, fail_start="no memory" if i == 0 and n > number else "")


def test_one_that_does_not_come_up_is_tried_again_so_often_and_then_stays_dead(
    fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service = fleet(2, broken_after(0), replace(QUICK, max_restarts=3))
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.NOBODY)
    assert (service.states, service.restarts) == (["DEAD", "SERVING"], [3, 0])
    assert service.replica_table[0].last_error == (
        "restarted 3 times within 300 s, and given up. The last error: replica 0 died: no memory"
    )
    with pytest.raises(ReplicaDiedError, match="which actor_index names, is dead: restarted 3 times within 300 s"):
        ask(service, actor_index=0)
    assert ask(service).metrics.replica == 1
    assert caplog.messages[-1].startswith("replica 0 is not restarted any more: restarted 3 times within 300 s")


def test_restarts_of_long_ago_do_not_count(fleet: Any) -> None:
    service = fleet(1, faults=replace(QUICK, max_restarts=1, restart_window=0.05))
    for number in range(1, 4):
        service.kill(0)
        until_serving(service, [number])
        time.sleep(0.06)


def test_delays_grow_with_each_restart(fleet: Any) -> None:
    times: list[float] = []

    def make(index: int, number: int) -> FakeReplica:
        times.append(time.monotonic())
        return FakeReplica(index, fail_start="no" if 0 < number < 4 else "")

    service = fleet(1, make, replace(QUICK, first_delay=0.05, longest_delay=10.0))
    service.kill(0)
    until_serving(service, [4])
    waits = [after - before for before, after in itertools.pairwise(times[1:])]
    assert [wait >= least for wait, least in zip(waits, (0.1, 0.2, 0.4), strict=True)] == [True] * 3


def test_calls_end_at_once_when_the_last_hope_is_given_up(fleet: Any) -> None:
    service = fleet(1, broken_after(0), replace(QUICK, max_restarts=2))
    service.replica_table[0].replica.token_seconds = HOUR
    call = in_thread(lambda: ask(service))
    task = in_thread(lambda: asyncio.run(service.agenerate("b")))
    until(lambda: service.replica_table[0].inflight == 2)
    service.kill(0, "lightning")
    for future in (call, task):
        with pytest.raises(
            NoReplicaError, match=r"no replica is serving: .*It had started on another replica: .*lightning"
        ):
            future.result(60.0)
    with pytest.raises(NoReplicaError, match="Make a new service"):
        service.pause()


def test_without_restarts_what_died_stays_dead(fleet: Any) -> None:
    service = fleet(2, faults=replace(QUICK, restart=False))
    service.kill(0)
    until(lambda: service.states == ["DEAD", "SERVING"])
    assert service.replica_table[0].recovery is Recovery.NOBODY
    service.kill(1)
    with pytest.raises(NoReplicaError):
        ask(service)
    assert [len(line) for line in service.made] == [1, 1]


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
    def make(index: int, number: int) -> FakeReplica:
        if number:
            raise KeyError("settings")
        return FakeReplica(index)

    service = fleet(1, make)
    service.kill(0)
    until(lambda: "the supervisor failed at replica 0, and goes on" in caplog.messages)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
    assert (service.states, service.replica_table[0].recovery) == (["DEAD"], Recovery.NOBODY)
    assert service.replica_table[0].last_error == "restarting failed with KeyError('settings')"


# -- the current weights ----------------------------------------------------------------------------------------------


def serve_version(service: RestartingService, version: int) -> Callable[[int], None]:
    def bring(index: int) -> None:
        service.replica_table.set_version(index, version)
        service.replica_table.set_state(index, ReplicaState.SERVING)

    return bring


def test_it_serves_once_it_was_brought_to_the_newest_weights(fleet: Any) -> None:
    service = fleet()
    service.replica_table.set_version(0, 7)
    asked: list[tuple[int, str]] = []

    def bring(index: int) -> None:
        asked.append((index, service.states[index]))
        if len(asked) < 3:
            raise WeightSyncError("the store is busy")
        serve_version(service, 7)(index)

    service.register_weight_sync(bring)
    service.kill(0)
    until_serving(service, [1, 0])
    assert asked == [(0, "STARTING")] * 3
    assert service.replica_table[0].version == 7
    assert service.replica_table[0].last_error == "its weights could not be loaded: the store is busy"


def test_a_sync_that_asks_the_interpreter_to_exit_is_tried_again(fleet: Any) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 7)
    tries = []

    def bring(index: int) -> None:
        tries.append(index)
        if len(tries) == 1:
            sys.exit("no store")
        serve_version(service, 7)(index)

    service.register_weight_sync(bring)
    service.kill(0)
    until_serving(service, [1])
    assert service.replica_table[0].last_error == "its weights could not be loaded: it raised SystemExit('no store')"


def test_one_that_dies_while_it_is_brought_is_restarted(fleet: Any) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 2)

    def bring(index: int) -> None:
        if len(service.made[0]) == 2:
            service.kill(index, "in the middle")
            raise ReplicaDiedError("died")
        serve_version(service, 2)(index)

    service.register_weight_sync(bring)
    service.kill(0)
    until_serving(service, [2])


@pytest.mark.parametrize("ended", [True, False])
def test_one_that_is_quarantined_while_it_is_brought_is_restarted(fleet: Any, ended: bool) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 2)

    def bring(index: int) -> None:
        if len(service.made[0]) == 2:
            service.replica_table.set_state(index, ReplicaState.QUARANTINED)
            if ended:
                service.replica_table[index].replica.shutdown()
                return
            raise RuntimeError("in the middle")
        serve_version(service, 2)(index)

    service.register_weight_sync(bring)
    service.kill(0)
    until_serving(service, [2])


def test_one_that_is_noted_as_dead_while_it_is_brought_is_restarted_though_it_lives(fleet: Any) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 2)

    def bring(index: int) -> None:
        if len(service.made[0]) == 2:
            service.replica_table.mark_dead(index)
            raise WeightSyncError("the replica is DEAD")
        serve_version(service, 2)(index)

    service.register_weight_sync(bring)
    service.kill(0)
    until_serving(service, [2])
    assert not service.made[0][1].is_alive()


def test_with_nothing_published_yet_the_checkpoints_weights_are_the_current_ones(fleet: Any) -> None:
    service = fleet(1)

    def bring(index: int) -> None:
        raise WeightSyncError("nothing was published")

    service.register_weight_sync(bring)
    service.kill(0)
    until_serving(service, [1])


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


def test_one_that_waited_is_brought_once_a_sync_has_updated_the_others(fleet: Any) -> None:
    service = fleet()
    service.replica_table.set_version(1, 3)
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.UPDATE)
    brought: list[int] = []
    service.register_weight_sync(lambda index: (brought.append(index), serve_version(service, 4)(index)))  # type: ignore[arg-type,func-returns-value]
    time.sleep(0.6)
    assert brought == []  # nothing newer was published: it may not have what the others have
    service.replica_table.set_version(1, 4)
    until_serving(service, [1, 0])
    assert brought == [0]
    assert [entry.version for entry in service.replica_table] == [4, 4]


def test_one_whose_update_fails_for_a_reason_that_nobody_expected_is_restarted(
    fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service = fleet()
    service.replica_table.set_version(1, 3)
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.UPDATE)

    def bring(index: int) -> None:
        if service.restarts[0] < 2:
            raise KeyError("a bug")
        serve_version(service, 4)(index)

    service.register_weight_sync(bring)
    service.replica_table.set_version(1, 4)
    until_serving(service, [2, 0])
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


def test_a_store_that_cannot_be_read_is_tried_again(fleet: Any) -> None:
    service = fleet()
    service.replica_table.set_version(1, 3)
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.UPDATE)
    tries = []

    def bring(index: int) -> None:
        tries.append(index)
        if len(tries) < 3:
            raise OSError("no space left on device")
        serve_version(service, 4)(index)

    service.register_weight_sync(bring)
    service.replica_table.set_version(1, 4)
    until_serving(service, [1, 0])
    assert tries == [0, 0, 0]


def test_one_that_dies_while_it_waits_for_an_update_is_restarted(fleet: Any) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 3)
    for number in (1, 2):
        service.kill(0)
        until(
            lambda number=number: (service.restarts, service.replica_table[0].recovery) == ([number], Recovery.UPDATE)
        )


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
    time.sleep(1.5)  # a few looks
    assert service.states == ["STARTING"]
    entry.replica.version = 57
    until_serving(service, [1])
    assert entry.version == 57
    assert ask(service, timeout_seconds=5.0).metrics.replica == 0


def test_one_that_comes_back_with_the_newest_weights_serves_them_at_once(fleet: Any) -> None:
    def make(index: int, number: int) -> FakeReplica:
        replica = FakeReplica(index)
        replica.version = 57 if number else 0  # its process lived; only the connection to it was lost
        return replica

    service = fleet(1, make)
    service.replica_table.set_version(0, 57)
    service.kill(0)
    until_serving(service, [1])
    assert service.replica_table[0].version == 57


# -- a service that is paused -----------------------------------------------------------------------------------------


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


def test_in_a_paused_service_one_that_an_update_of_the_users_brings_is_paused(fleet: Any) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 3)
    service.pause()
    service.kill(0)
    until(lambda: service.replica_table[0].recovery is Recovery.UPDATE)
    serve_version(service, 4)(0)
    until(lambda: service.replica_table[0].replica._paused)
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
    service = fleet(2, lambda i, n: FakeReplica(i, token_seconds=HOUR if (i, n) == (0, 0) else 0.0))
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


def test_a_slow_replica_is_not_ended_nor_one_in_sync_or_paused(fleet: Any) -> None:
    service = fleet(3, faults=replace(QUICK, slow_patience=HOUR))
    slow, syncing, paused = (line[0] for line in service.made)

    ticks = iter(range(1, 10**6))
    slow.overrides["probe"] = lambda *_, **__: ProbeReport(core_answered=False, cpu_seconds=float(next(ticks)))
    service.replica_table.set_state(1, ReplicaState.SYNCING)
    syncing.stall()
    paused.call(Engine.pause, 1.0, "keep", False)
    time.sleep(0.5)
    assert service.restarts == [0, 0, 0]
    assert service.states == ["SERVING", "SYNCING", "SERVING"]


def test_a_late_request_has_its_replica_looked_at_now(fleet: Any) -> None:
    service = fleet(1, lambda i, n: FakeReplica(i, token_seconds=HOUR), replace(QUICK, probe=HOUR, patience=HOUR))
    asked = threading.Event()
    service.made[0][0].overrides["probe"] = lambda *_, **__: asked.set() or ProbeReport(core_answered=True)
    with pytest.raises(TimeoutError):
        ask(service, timeout_seconds=0.05)
    assert asked.wait(60.0)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_replica_that_cannot_be_asked_whether_it_lives_keeps_no_other_from_coming_back(fleet: Any) -> None:
    service = fleet(3)

    def broken() -> bool:
        raise OSError("too many open files")

    service.made[0][0].is_alive = broken
    try:
        service.kill(1)
        until_serving(service, [0, 1, 0])
        expected = "EngineError: replica 0 could not be asked whether it is alive: OSError('too many open files')"
        until(lambda: service._fleet.supervisor_error == expected)
    finally:
        del service.made[0][0].is_alive
    until(lambda: [row["supervisor_error"] for row in service.stats()] == [None] * 3)


def test_one_that_cannot_be_probed_keeps_no_other_from_being_probed(fleet: Any) -> None:
    service = fleet(2)

    def broken(*what: Any) -> Any:
        raise OSError("too many open files")

    service.made[0][0].ask = broken
    service.made[1][0].stall()
    until_serving(service, [1, 1])  # the one that cannot even be asked gave no sign of life either


def test_it_outlives_an_error_says_so_and_continues(fleet: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    service = fleet()
    start = threading.Thread.start

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
    assert "the supervisor failed at replica 0, and goes on" in [record.message for record in caplog.records]
    service.replica_table[1].replica.stall()  # probes continue, too
    until_serving(service, [1, 1])


def no_thread_restarts() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("torchrl_moe-restart")]


def test_shutdown_during_a_restart_leaves_nothing(fleet: Any) -> None:
    service = fleet(1, lambda i, n: FakeReplica(i, start_seconds=HOUR if n else 0.0), replace(QUICK, start=2 * HOUR))
    service.kill(0)
    until(lambda: service.restarts == [1])
    call = in_thread(lambda: ask(service))
    started = time.monotonic()
    service.shutdown()
    assert time.monotonic() - started < PATIENCE
    with pytest.raises(EngineError):  # whichever comes first: no replica comes back, or the service was shut down
        call.result(60.0)
    until(no_thread_restarts)


def test_a_replica_that_its_driver_leaves_while_it_starts_is_not_ended(fleet: Any) -> None:
    service = fleet(1, lambda i, n: FakeReplica(i, start_seconds=HOUR if n else 0.0), replace(QUICK, start=2 * HOUR))
    service.kill(0)
    until(lambda: service.restarts == [1])
    replica = service.made[0][1]
    ended = []
    replica.shutdown = lambda: ended.append(1)
    service._fleet.end(lambda replica: replica.die("this driver has left"))  # as AsyncVLLM.disconnect() does
    until(no_thread_restarts)
    assert ended == []


def test_a_replica_that_is_ready_after_the_end_is_awaited_by_nobody(fleet: Any) -> None:
    ready = threading.Event()

    def wait() -> None:
        assert ready.wait(60.0)

    service = fleet(1, lambda i, n: ScriptedReplica(i, script={"ready": wait} if n else {}))
    service.replica_table.set_version(0, 3)
    service.kill(0)
    until(lambda: service.restarts == [1])
    call = in_thread(lambda: ask(service))
    service._fleet.end(lambda replica: ready.set())
    until(no_thread_restarts)
    assert service.replica_table[0].recovery is Recovery.NOBODY
    with pytest.raises(NoReplicaError):
        call.result(60.0)


def test_shutdown_during_a_delay_starts_nothing(fleet: Any) -> None:
    service = fleet(1, faults=replace(QUICK, first_delay=60.0, longest_delay=60.0))
    service.kill(0)
    until(lambda: service.states == ["DEAD"])
    service.shutdown()
    assert len(service.made[0]) == 1


def test_a_delay_without_end_starts_nothing_until_the_shutdown(fleet: Any) -> None:
    service = fleet(1, faults=replace(QUICK, first_delay=math.inf, longest_delay=math.inf))
    service.kill(0)
    until(lambda: service.states == ["DEAD"])
    time.sleep(0.2)
    assert service.replica_table[0].recovery is Recovery.SUPERVISOR
    service.shutdown()
    until(no_thread_restarts)
    assert len(service.made[0]) == 1


def test_a_sync_may_end_the_service(fleet: Any) -> None:
    service = fleet(1)
    service.replica_table.set_version(0, 7)
    service.register_weight_sync(lambda index: service.shutdown())
    service.kill(0)
    until(lambda: not service.is_running)
    until(no_thread_restarts)
    assert service.states == ["DEAD"]


def test_shutdowns_and_deaths_at_any_moment_leave_nothing(fleet: Any) -> None:
    for number in range(12):
        service = fleet(2, lambda i, n: FakeReplica(i, start_seconds=0.002 * n))
        service.kill(0)
        time.sleep(0.0005 * number)
        service.shutdown()
        assert not any(replica.is_alive() for line in service.made for replica in line)


def test_a_service_that_is_forgotten_is_collected() -> None:
    service = RestartingService()
    gone = weakref.ref(service)
    del service
    until(lambda: gc.collect() >= 0 and gone() is None, look_every=0.05)


AT_EXIT = """
import time, weakref
from torchrl_moe.modules.serving import fleet
from torchrl_moe.modules.serving.candidates import FaultPolicy
from torchrl_moe.testing import FakeAsyncVLLM

fleet.TICK_SECONDS = 0.02

class Child: pass

def end():  # as the replicas of processes do
    engine.replicas[0].die()
    time.sleep(0.4)
    print(engine.replica_table[0].restarts, engine.replica_table[0].state.name, flush=True)

child = Child()
weakref.finalize(child, end)
engine = FakeAsyncVLLM(faults=FaultPolicy(first_delay=0.0))
"""


def test_what_ends_at_interpreter_exit_is_not_restarted() -> None:
    run = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "0 SERVING\n"


def test_the_fake_engine_restarts_if_it_has_a_policy() -> None:
    with FakeAsyncVLLM(2, seed=3, faults=QUICK) as engine:
        before = engine.generate("hi", use_tqdm=False, actor_index=1).outputs[0].text
        engine.replicas[1].die()
        until(lambda: engine.replica_table[1].restarts == 1 and engine.replica_table[1].state is ReplicaState.SERVING)
        assert engine.replicas[1].is_alive()
        assert engine.generate("hi", use_tqdm=False, actor_index=1).outputs[0].text == before


def test_an_error_at_a_replica_that_is_removed_is_forgotten(fleet: Any, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> bool:
        raise ValueError("cannot be asked")

    service = fleet()
    service.replica_table[0].replica.is_alive = refuse
    until(lambda: "the supervisor failed at replica 0, and goes on" in caplog.messages)
    service.remove_replica(0, drain=False)
    del service.made[0][0].is_alive
    until(lambda: service.stats()[0]["supervisor_error"] is None, 10.0)


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


def test_a_replica_that_cannot_be_ended_does_not_keep_the_service_from_its_end(fleet: Any) -> None:
    before = threading.enumerate()  # other tests' services may live beside it
    service = fleet()
    end = service.replica_table[0].replica.shutdown

    def refuse() -> None:
        service.replica_table[0].replica.shutdown = end
        raise OSError("it does not end")

    service.replica_table[0].replica.shutdown = refuse
    loops = [one for one in threading.enumerate() if one.name == "torchrl_moe-service" and one not in before]
    assert len(loops) == 1
    with pytest.raises(OSError, match="it does not end"):
        service.shutdown()
    assert not service.made[1][0].is_alive()
    until(lambda: not any(thread.is_alive() for thread in loops), 10.0)
