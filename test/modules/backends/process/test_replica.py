"""A replica as a driver sees it: what waits is answered or failed, and no process is ever left.

Most tests run our real engine process over the toy engine, which starts in a second; the last ones start vLLM.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from support.processes import group, ids_request, process_of, toy_environment, toy_replica
from support.waiting import HOUR, PATIENCE, until
from torchrl_moe.errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.process import child
from torchrl_moe.modules.backends.process.process_replica import LocalReplica
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.backends.vllm import engine_args as kind

START = 120.0  # generous: two seconds, on a machine of its own


@pytest.fixture(scope="module")
def lasting() -> Iterator[LocalReplica]:
    """A replica that the tests of requests and commands share; they leave it serving."""
    replica = toy_replica(3)
    replica.start()
    assert replica.wait_ready(START).model == "toy"
    yield replica
    assert replica.is_alive()
    replica.shutdown()


def started(**how: Any) -> tuple[LocalReplica, int]:
    replica = toy_replica(**how)
    replica.start()
    replica.wait_ready(START)
    return replica, process_of(replica).pid


def rpc(replica: LocalReplica, method: str, *args: Any, timeout: float = 10.0) -> Any:
    return replica.call(Engine.collective_rpc, timeout, method, args, None)


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["sampling_params", "guided_options", "lora_request"])
def test_of_every_field_what_is_not_plain_is_refused_by_its_class(lasting: LocalReplica, field: str) -> None:
    (other,) = lasting.submit([ids_request("other", sampling_params={"seconds": 0.3})])
    (future,) = lasting.submit([ids_request("x", **{field: {"mode": threading.Lock()}})])
    with pytest.raises(ValueError, match=r"_thread\.lock has no plain form"):
        future.result(0)
    assert other.result(60.0).request_id == "other"


def test_a_future_that_its_owner_cancelled_disturbs_nobody(lasting: LocalReplica) -> None:
    first, second = lasting.submit(
        [ids_request("a", sampling_params={"seconds": 0.1}), ids_request("b", sampling_params={"seconds": 0.2})]
    )
    assert first.cancel()
    assert second.result(60.0).request_id == "b"


# -- commands ---------------------------------------------------------------------------------------------------------


def test_stats_come_by_themselves(lasting: LocalReplica) -> None:
    before = lasting.call(Engine.stats, 5).requests
    lasting.submit([ids_request("f")])[0].result(60.0)
    until(lambda: lasting.last_stats is not None and lasting.last_stats.requests == before + 1)
    assert lasting.last_stats == lasting.call(Engine.stats, 5)


def test_a_command_has_a_deadline_and_its_late_answer_disturbs_nobody(lasting: LocalReplica) -> None:
    with pytest.raises(EngineError, match=r"replica 3 did not answer 'collective_rpc' within 0\.2 s"):
        rpc(lasting, "sleep", 0.6, timeout=0.2)
    time.sleep(0.6)
    assert rpc(lasting, "echo") == [["echo", [], None]]


# -- before and after its life ----------------------------------------------------------------------------------------


def test_a_replica_that_was_not_started_says_so_and_can_be_shut_down() -> None:
    replica = toy_replica(5)
    assert replica.log_tail() == ""
    replica.shutdown()
    assert not replica.is_alive()
    for use in (
        lambda: replica.submit([ids_request("x")]),
        lambda: replica.abort(["x"]),
        lambda: replica.call(Engine.stats, 1),
        lambda: replica.wait_ready(1),
    ):
        with pytest.raises(RuntimeError, match="replica 5 was not started: call start"):
            use()


def test_a_shutdown_fails_what_waits_at_once_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE_SECONDS", HOUR)
    replica, pid = started(sleeper=True)
    assert len(group(pid)) == 2
    log = replica._child.log
    (future,) = replica.submit([ids_request("x", sampling_params={"seconds": 3600})])
    began = time.monotonic()
    replica.shutdown()
    assert time.monotonic() - began < PATIENCE
    until(lambda: not group(pid))
    assert not log.exists()
    with pytest.raises(ReplicaDiedError, match="replica 0 was shut down"):
        future.result(0)


def test_a_start_that_points_to_its_log_names_what_is_there_first() -> None:
    log = (
        "(Worker pid=7) ERROR 11-26 [cpu_worker.py:83] ValueError: Available memory on node 0 is too small\n"
        "(EngineCore pid=5) ERROR 11-26 [core.py:1512] RuntimeError: Worker failed with error, see the root cause above"
    )
    replica = toy_replica(4, error="Engine core initialization failed. See root cause above.", print=log)
    replica.start()
    words = r"^replica 4 did not start: ValueError: Available memory on node 0 is too small \(ValueError: Engine core"
    with pytest.raises(ReplicaDiedError, match=words):
        replica.wait_ready(START)
    replica.shutdown()


def test_a_replica_that_fails_to_start_says_why_and_leaves_nothing() -> None:
    replica = toy_replica(4, error="no such model", sleeper=True, print="SomeError: in the log")
    replica.start()
    pid = process_of(replica).pid
    with pytest.raises(ReplicaDiedError, match=r"(?s)replica 4 did not start: ValueError: no such model\n.*in the log"):
        replica.wait_ready(START)
    assert not replica.is_alive()
    until(lambda: not group(pid))  # before anybody shuts it down
    replica.shutdown()


def test_a_start_that_takes_too_long_shows_the_log_and_is_shut_down_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE_SECONDS", HOUR)
    replica = toy_replica(seconds=3600, sleeper=True, print="still loading")
    replica.start()
    pid = process_of(replica).pid
    until(lambda: len(group(pid)) == 2, START)
    with pytest.raises(EngineError, match=r"(?s)replica 0 was not ready within 0 s\. Its log so far:\nstill loading"):
        replica.wait_ready(0.1)
    assert replica.is_alive()
    began = time.monotonic()
    replica.shutdown()  # not after the grace period: that is for engines that serve
    assert time.monotonic() - began < PATIENCE
    until(lambda: not group(pid))


def test_a_replica_that_is_forgotten_is_ended() -> None:
    replica, pid = started(sleeper=True)
    log, gone = replica._child.log, weakref.ref(replica)
    del replica
    gc.collect()
    assert gone() is None
    until(lambda: not group(pid))
    until(lambda: not log.exists())


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["shutdown", "kill"])
def test_shared_memory_that_the_engine_left_behind_is_removed(how: str) -> None:
    replica = toy_replica(shared=True, sleeper=True)
    replica.start()
    segment = Path("/dev/shm") / replica.wait_ready(START).model
    pid = process_of(replica).pid
    assert segment.exists()
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        replica.shutdown()
    until(lambda: not segment.exists())
    until(lambda: not group(pid))
    replica.shutdown()


def test_a_killed_child_fails_all_that_waits_and_its_group_goes_with_it() -> None:
    replica, pid = started(sleeper=True)
    futures = replica.submit([ids_request(str(i), sampling_params={"seconds": 3600}) for i in range(3)])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(rpc, replica, "sleep", 60, timeout=60)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        for waiting in (*futures, call):
            with pytest.raises(ReplicaDiedError, match="replica 0 ended with exit code -9"):
                waiting.result(60.0)
    until(lambda: not group(pid))
    assert isinstance(replica.ask(Engine.probe, 1.0).exception(60.0), ReplicaDiedError)
    replica.shutdown()


def test_requests_submitted_while_the_child_dies_all_fail_and_none_hangs() -> None:
    replica, pid = started()
    futures: list[Future[Any]] = []
    stop = threading.Event()

    def submit(thread: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            futures.extend(replica.submit([ids_request(f"{thread}-{number}", sampling_params={"seconds": 3600})]))

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(submit, thread) for thread in range(4)]
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not replica.is_alive())
        time.sleep(0.2)
        stop.set()
        for thread in threads:
            thread.result(60.0)  # submit never raises
    assert len(futures) > 100
    assert {type(future.exception(5)) for future in futures} == {ReplicaDiedError}
    replica.shutdown()


def test_an_engine_that_dies_fails_everything_as_a_death_and_the_process_ends() -> None:
    replica, pid = started(sleeper=True)
    open_one, failing = replica.submit(
        [ids_request("open", sampling_params={"seconds": 3600}), ids_request("failing", sampling_params={"seconds": 3})]
    )
    rpc(replica, "die")
    for future in (open_one, failing):
        with pytest.raises(ReplicaDiedError, match="replica 0 died: vLLM's engine core died: the toy is broken"):
            future.result(60.0)
    assert not replica.is_alive()
    until(lambda: not group(pid))
    replica.shutdown()


def test_a_stuck_child_holds_up_neither_callers_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE_SECONDS", 1.0)
    replica, pid = started(sleeper=True)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"did not answer 'stats' within 0\.3 s"):
        replica.call(Engine.stats, 0.3)
    # far more than the socket holds: the writer waits
    big = [
        Request(request_id=str(i), sampling_params=None, prompt_token_ids=np.zeros(1 << 20, np.int32)) for i in (1, 2)
    ]
    futures = replica.submit(big)
    replica.abort(["1"])
    with pytest.raises(EngineError, match=r"did not answer 'stats' within 0\.3 s"):
        replica.call(Engine.stats, 0.3)
    assert replica.is_alive()
    began = time.monotonic()
    replica.shutdown()
    assert time.monotonic() - began >= 1.0
    for future in futures:
        with pytest.raises(ReplicaDiedError, match="was shut down"):
            future.result(0)
    until(lambda: not group(pid))


# -- the end of the driver --------------------------------------------------------------------------------------------

DRIVER = """
import os, sys, time
from support.processes import ids_request, process_of, toy_replica
how = sys.argv[1]
replica = toy_replica(sleeper=True, seconds=3600 if how == "starting" else 0)
replica.start()
if how != "starting":
    replica.wait_ready(120)
    replica.submit([ids_request("x", sampling_params={"seconds": 3600})])
if how == "forked" and os.fork() == 0:  # holds the driver's end of the socket open
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: two processes write here
    time.sleep(60)
    os._exit(0)
os.write(1, b"%d\\n" % process_of(replica).pid)
if how == "raises":
    raise SystemExit("the user's script failed")
time.sleep(60)
"""


def driver(how: str, temporary: Path) -> subprocess.Popen[str]:
    """Start a driver, whose replica's folder lies in ``temporary``."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, how],
        env={**toy_environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", ["starting", "a process is stopped", "forked"])
def test_a_killed_driver_takes_its_engines_with_it(how: str, tmp_path: Path) -> None:
    """Also while they start, where a process of theirs is stopped, and where one that the driver forked lives on."""
    with driver(how, tmp_path) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2 if how == "forked" else 1)]
        (engine,) = [pid for pid in pids if os.getpgid(pid) == pid]
        until(lambda: len(group(engine)) == 2, START)
        if how == "a process is stopped":
            (sleeper,) = [member.pid for member in group(engine) if member.pid != engine]
            os.kill(sleeper, signal.SIGSTOP)
            until(lambda: psutil.Process(sleeper).status() == psutil.STATUS_STOPPED)
        process.kill()
        process.wait(60.0)
        until(lambda: not group(engine))
        until(lambda: list(tmp_path.iterdir()) == [])  # the leader was there to clear up
        for forked in set(pids) - {engine}:
            os.kill(forked, signal.SIGKILL)


def test_a_driver_that_ends_without_a_shutdown_leaves_nothing(tmp_path: Path) -> None:
    with driver("raises", tmp_path) as process:
        output, errors = process.communicate(timeout=START)
    assert "Exception ignored" not in errors
    assert "the user's script failed" in errors
    until(lambda: not group(int(output)))
    assert list(tmp_path.iterdir()) == []


# -- vLLM itself ------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_model_folder_that_vllm_refuses_is_reported_in_its_words_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    replica = LocalReplica(0, kind, {"model": str(tmp_path)}, kind.engine_environment())
    replica.start()
    pid = process_of(replica).pid
    with pytest.raises(ReplicaDiedError, match=r"(?s)replica 0 did not start: .*no_such_model"):
        replica.wait_ready(120)
    until(lambda: not group(pid))
    replica.shutdown()


@pytest.mark.parametrize(("tag", "value"), [("completions", [{"request_id": "r"}]), ("ReplicaStats", {"running": "x"})])
def test_a_value_of_another_release_fails_its_call_alone(lasting: LocalReplica, tag: str, value: Any) -> None:
    future: Future[Any] = Future()
    lasting._calls[-7] = future
    lasting._handle("result", [-7, tag, value])
    assert "is not of this version" in str(future.exception(0))
    assert lasting.submit([ids_request("after")])[0].result(60.0).request_id == "after"


def test_a_replica_starts_once(lasting: LocalReplica) -> None:
    with pytest.raises(RuntimeError, match="replica 3 was started before"):
        lasting.start()
