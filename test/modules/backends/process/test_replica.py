"""A replica as a driver sees it: what waits is answered or failed, and no process is ever left.

Most tests run our real engine process over the toy engine, which starts in a second; the last ones start vLLM.
"""

from __future__ import annotations

import gc
import itertools
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

from support.processes import group, ids_request, is_gone, process_of, toy_environment, toy_replica
from support.waiting import HOUR, PATIENCE, until
from torchrl_moe.errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.process import process_replica
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
    """A replica that serves, with a child of its engine's, and its process."""
    replica = toy_replica(sleeper=True, **how)
    replica.start()
    replica.wait_ready(START)
    return replica, process_of(replica).pid


def waiting(*names: str, seconds: float = HOUR, **fields: Any) -> list[Request]:
    """Requests that take so long."""
    return [ids_request(name, sampling_params={"seconds": seconds}, **fields) for name in names]


def check_soon(what: Any) -> None:
    """It does not wait for what takes an hour."""
    began = time.monotonic()
    what()
    assert time.monotonic() - began < PATIENCE


def rpc(replica: LocalReplica, method: str, *args: Any, timeout: float = 10.0) -> Any:
    return replica.call(Engine.collective_rpc, timeout, method, args, None)


@pytest.mark.parametrize("field", ["sampling_params", "guided_options", "lora_request"])
def test_of_every_field_what_is_not_plain_is_refused_by_its_class(lasting: LocalReplica, field: str) -> None:
    bad = ids_request("x", **{field: {"mode": threading.Lock()}})
    other, future = lasting.submit([*waiting("other", seconds=0.3), bad])  # in one message
    with pytest.raises(ValueError, match=r"_thread\.lock has no plain form"):
        future.result(0)
    assert other.result(60.0).request_id == "other"


def test_a_future_that_its_owner_cancelled_disturbs_nobody(lasting: LocalReplica) -> None:
    first, second = lasting.submit([*waiting("a", seconds=0.1), *waiting("b", seconds=0.2)])
    assert first.cancel()
    assert second.result(60.0).request_id == "b"


def test_a_command_has_a_deadline_and_its_late_answer_disturbs_nobody(lasting: LocalReplica) -> None:
    with pytest.raises(EngineError, match=r"replica 3 did not answer 'collective_rpc' within 0\.2 s"):
        rpc(lasting, "sleep", 0.6, timeout=0.2)
    time.sleep(0.6)
    assert rpc(lasting, "echo") == [["echo", [], None]]


@pytest.mark.parametrize(("tag", "value"), [("completions", [{"request_id": "r"}]), ("ReplicaStats", {"running": "x"})])
def test_a_value_of_another_release_fails_its_call_alone(lasting: LocalReplica, tag: str, value: Any) -> None:
    future: Future[Any] = Future()
    lasting._calls[-7] = future
    lasting._handle("result", [-7, tag, value])
    assert "is not of this version" in str(future.exception(0))
    assert lasting.submit([ids_request("after")])[0].result(60.0).request_id == "after"


def test_a_replica_starts_once_and_before_that_says_so_and_can_be_shut_down(lasting: LocalReplica) -> None:
    with pytest.raises(RuntimeError, match="replica 3 was started before"):
        lasting.start()
    replica = toy_replica(5)
    assert replica.log_tail() == ""
    replica.shutdown()
    assert not replica.is_alive()
    for use, arguments in (("submit", [[]]), ("abort", [["x"]]), ("call", [Engine.stats, 1]), ("wait_ready", [1])):
        with pytest.raises(RuntimeError, match="replica 5 was not started: call start"):
            getattr(replica, use)(*arguments)


LOG = (
    "(Worker pid=7) ERROR 11-26 [cpu_worker.py:83] ValueError: Available memory on node 0 is too small\n"
    "(EngineCore pid=5) ERROR 11-26 [core.py:1512] RuntimeError: Worker failed with error, see the root cause above"
)


@pytest.mark.parametrize(
    ("error", "log", "words"),
    [
        ("no such model", "SomeError: in the log", r"no such model\n[\s\S]*in the log"),
        (
            "Engine core initialization failed. See root cause above.",  # what the log names first is said
            LOG,
            r"Available memory on node 0 is too small \(ValueError: Engine core",
        ),
    ],
)
def test_a_replica_that_fails_to_start_says_why_and_leaves_nothing(error: str, log: str, words: str) -> None:
    replica = toy_replica(4, error=error, sleeper=True, print=log)
    replica.start()
    pid = process_of(replica).pid
    with pytest.raises(ReplicaDiedError, match=rf"replica 4 did not start: ValueError: {words}"):
        replica.wait_ready(START)
    assert not replica.is_alive()
    until(lambda: not group(pid))  # before anybody shuts it down
    replica.shutdown()


def test_a_start_that_takes_too_long_shows_the_log_and_is_shut_down_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_replica, "GRACE_SECONDS", HOUR)
    replica = toy_replica(seconds=3600, sleeper=True, print="still loading")
    replica.start()
    pid = process_of(replica).pid
    until(lambda: len(group(pid)) == 2, START)
    with pytest.raises(EngineError, match=r"(?s)replica 0 was not ready within 0 s\. Its log so far:\nstill loading"):
        replica.wait_ready(0.1)
    assert replica.is_alive()
    check_soon(replica.shutdown)  # not after the grace period: that is for engines that serve
    until(lambda: not group(pid))


def test_a_replica_that_is_forgotten_is_ended() -> None:
    replica, pid = started()
    log, gone = replica._child.log, weakref.ref(replica)
    del replica
    gc.collect()
    assert gone() is None
    until(lambda: not group(pid) and not log.exists())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shutdown", "was shut down"),
        ("kill", "ended with exit code -9"),
        ("die", "died: vLLM's engine core died: the toy is broken"),
    ],
)
def test_an_end_fails_what_waits_and_leaves_no_process_log_or_shared_memory(
    monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    monkeypatch.setattr(process_replica, "GRACE_SECONDS", HOUR)
    replica, pid = started(shared=True)
    segment, log = Path("/dev/shm") / replica.wait_ready(START).model, replica._child.log
    assert segment.exists()
    assert len(group(pid)) >= 2
    futures = [*replica.submit(waiting(*"abc")), replica.ask(Engine.collective_rpc, "sleep", [60], None)]
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    elif how == "die":
        replica.submit(waiting("failing", seconds=3.0))
        rpc(replica, "die")
    else:
        check_soon(replica.shutdown)
    for future in futures:
        with pytest.raises(ReplicaDiedError, match=f"replica 0 {words}"):
            future.result(60.0)
    assert not replica.is_alive()
    assert isinstance(replica.ask(Engine.probe, 1.0).exception(60.0), ReplicaDiedError)
    until(lambda: not segment.exists() and not group(pid))
    replica.shutdown()
    until(lambda: not log.exists())


def test_requests_submitted_while_the_child_dies_all_fail_and_none_hangs() -> None:
    replica, pid = started()
    futures: list[Future[Any]] = []
    stop = threading.Event()

    def submit(thread: int) -> None:
        for number in itertools.count():
            futures.extend(replica.submit(waiting(f"{thread}-{number}")))
            if stop.is_set():
                break

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


def test_a_stuck_child_holds_up_neither_callers_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_replica, "GRACE_SECONDS", 1.0)
    replica, pid = started()
    os.kill(pid, signal.SIGSTOP)
    # far more than the socket holds: the writer waits
    futures = replica.submit([ids_request(name, np.zeros(1 << 20)) for name in "ab"])
    replica.abort(["a"])
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
    os.write(1, b"forked %d\\n" % os.getpid())  # in one piece: two processes write here
    time.sleep(60)
    os._exit(0)
engine = process_of(replica)
os.write(1, b"engine %d %d\\n" % (engine.pid, engine.ppid()))
if how == "raises":
    raise SystemExit("the user's script failed")
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["starting", "a process is stopped", "forked", "raises"])
def test_a_driver_that_ends_takes_its_engines_with_it(how: str, tmp_path: Path) -> None:
    """Killed: also while they start, where a process of theirs is stopped, and where one that it forked lives on."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, how],
        env={**toy_environment(), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(2 if how == "forked" else 1)]
        pids = {name: list(map(int, found)) for name, *found in lines}
        engine, server = pids["engine"]
        if how == "raises":
            _, errors = process.communicate(timeout=START)
            assert "Exception ignored" not in errors
            assert "the user's script failed" in errors
        else:
            until(lambda: len(group(engine)) == 2, START)
        if how == "a process is stopped":
            (sleeper,) = [member.pid for member in group(engine) if member.pid != engine]
            os.kill(sleeper, signal.SIGSTOP)
            until(lambda: psutil.Process(sleeper).status() == psutil.STATUS_STOPPED)
        process.kill()
        process.wait(60.0)
    until(lambda: not group(engine) and is_gone(server))
    until(lambda: list(tmp_path.iterdir()) == [])  # the leader was there to clear up
    for forked in pids.get("forked", []):
        os.kill(forked, signal.SIGKILL)


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
