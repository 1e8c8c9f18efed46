"""A replica without Ray: a child process that owns an ``AsyncLLM``, reached over one socket.

The child is a session leader of its own, so a Ctrl-C at the terminal reaches the driver only, and the whole group
(vLLM starts two more processes) can be ended at once. The child is started by module name: the user's script is not
imported again and needs no ``__main__`` guard.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torchrl_moe
from torchrl_moe._errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.replica import Completion, PauseMode, ReplicaInfo, ReplicaStats, Request
from torchrl_moe.modules.backends.vllm import wire

__all__ = ["LocalReplica", "engine_environment"]

MODULE = "torchrl_moe.modules.backends.vllm.engine_process"
GRACE_SECONDS = 10.0
SHOWN_LOG_LINES = 6
SHOWN_LOG_COLUMNS = 400


def engine_environment(devices: str | None = None, num_replicas: int = 1, verbose: bool = False) -> dict[str, str]:
    """Return the environment of an engine process: the driver's, plus what vLLM needs where the user was silent.

    Args:
        devices: the value of ``CUDA_VISIBLE_DEVICES``; ``None`` on a machine without GPUs.
        num_replicas: how many engines share the machine's cores.
        verbose: whether vLLM logs at its own default level.
    """
    environment = dict(os.environ)
    root = str(Path(torchrl_moe.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "WARNING")
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
        return environment
    # Measured on CPU: compiling vLLM's log-prob helper costs 10 s and gains nothing; binding threads to cores puts
    # every replica on the same ones; a thread more than there are free cores makes a step ten times slower.
    threads = max(((os.cpu_count() or 2) - 1) // num_replicas, 1)
    environment.setdefault("TORCH_COMPILE_DISABLE", "1")
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


class LocalReplica:
    """See :class:`~torchrl_moe.modules.backends.replica.Replica` for the life of a replica.

    Args:
        index: place in the service.
        arguments: keywords of vLLM's ``AsyncEngineArgs``.
        environment: environment of the child, see :func:`engine_environment`.
    """

    def __init__(self, index: int, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.index = index
        self._arguments = dict(arguments)
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._numbers = itertools.count()
        self._ready: Future[ReplicaInfo] = Future()
        self._requests: dict[str, Future[Completion]] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._death: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log: Path | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the child and send it its arguments."""
        ours, theirs = socket.socketpair()
        handle, path = tempfile.mkstemp(prefix=f"torchrl_moe-replica-{self.index}-", suffix=".log")
        self._log = Path(path)
        with theirs, os.fdopen(handle, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        # also runs at interpreter exit, whatever the user forgot
        self._end = weakref.finalize(self, _end_process, self._process, self._connection, self._log)
        threading.Thread(
            target=_receive, args=(weakref.ref(self), self._connection), name=f"replica-{self.index}", daemon=True
        ).start()
        self._send("configure", self._arguments)

    def wait_ready(self, timeout: float) -> ReplicaInfo:
        """Wait until the engine serves.

        Raises:
            ReplicaDiedError: the engine did not come up; the message ends with its own last words.
            EngineError: it did not come up in time.
        """
        try:
            return self._ready.result(timeout)
        except FutureTimeout:
            raise EngineError(
                f"replica {self.index} was not ready within {timeout:.0f} s. Its log so far:\n{self.log_tail()}"
            ) from None

    def is_alive(self) -> bool:
        """Whether the child runs and has not reported its engine's death."""
        return self._process is not None and self._death is None and self._process.poll() is None

    def shutdown(self) -> None:
        """Ask the child to end, and end its whole process group after a grace period. Idempotent."""
        if self._process is None:
            return
        self._fail_all(f"replica {self.index} was shut down")
        self._end()

    def log_tail(self, lines: int = SHOWN_LOG_LINES) -> str:
        """Return the last errors that the child printed, or its last lines if it printed none."""
        if self._log is None or not self._log.exists():
            return "(no log)"
        text = [line[:SHOWN_LOG_COLUMNS] for line in self._log.read_text(errors="replace").splitlines()]
        errors = [line for line in text if "Error" in line and "See root cause above" not in line]
        shown = errors or [line for line in text if "WARNING" not in line and "shards:" not in line]
        return "\n".join(shown[-lines:]) or "(its log holds no error)"

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Send requests in one message; see the protocol."""
        futures: list[Future[Completion]] = [Future() for _ in requests]
        with self._lock:
            if self._death is None:
                for request, future in zip(requests, futures, strict=True):
                    self._requests[request.request_id] = future
        if self._death is not None:
            for future in futures:
                future.set_exception(ReplicaDiedError(self._death))
            return futures
        self._send("generate", wire.pack_requests(requests))
        return futures

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; their futures resolve with what they had."""
        if self._death is None:
            self._send("abort", list(request_ids))

    # -- commands ---------------------------------------------------------------------------------------------------

    def call(self, command: str, timeout: float, **kwargs: Any) -> Any:
        """Run a command of the child; see the protocol."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        with self._lock:
            self._calls[number] = future
        if self._death is not None:
            raise ReplicaDiedError(self._death)
        self._send("call", number, command, kwargs)
        try:
            return future.result(timeout)
        except FutureTimeout:
            raise EngineError(f"replica {self.index} did not answer {command!r} within {timeout:g} s") from None
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Stop scheduling; see the protocol."""
        self.call("pause", timeout, mode=mode, clear_cache=clear_cache)

    def resume(self, timeout: float) -> None:
        """Go on scheduling."""
        self.call("resume", timeout)

    def stats(self, timeout: float) -> ReplicaStats:
        """Read the engine's figures."""
        stats: ReplicaStats = self.call("stats", timeout)
        return stats

    # -- plumbing ---------------------------------------------------------------------------------------------------

    def _send(self, *message: Any) -> None:
        if self._connection is None:
            raise RuntimeError(f"replica {self.index} was not started: call start() first")
        try:
            with self._send_lock:
                wire.send(self._connection, message)
        except OSError:
            self._fail_all(self._why_dead())

    def _handle(self, kind: str, *rest: Any) -> None:
        """Act on one message of the child, in the receiver thread."""
        if kind == "completions":
            for completion in wire.unpack_completions(rest[0], self.index):
                self._resolve(self._requests, completion.request_id, completion)
        elif kind == "refused":
            for request_id, reason, text in rest[0]:
                self._resolve(self._requests, request_id, _error(reason, text))
        elif kind == "result":
            self._resolve(self._calls, rest[0], rest[1])
        elif kind == "error":
            self._resolve(self._calls, rest[0], _error(rest[1], rest[2]))
        elif kind == "ready":
            self._ready.set_result(rest[0])
        elif kind == "failed":
            self._fail_all(f"replica {self.index} did not start: {rest[0]}\n{self.log_tail()}")
        else:
            self._fail_all(f"replica {self.index} died: {rest[0]}\n{self.log_tail()}")

    def _resolve(self, table: dict[Any, Future[Any]], key: Any, value: Any) -> None:
        with self._lock:
            future = table.pop(key, None)
        if future is not None and future.set_running_or_notify_cancel():
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)

    def _why_dead(self) -> str:
        code = None if self._process is None else self._process.poll()
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        return f"replica {self.index} {how}. Its last log lines:\n{self.log_tail()}"

    def _fail_all(self, reason: str) -> None:
        """Fail everything that waits; the first reason stays."""
        with self._lock:
            if self._death is not None:
                return
            self._death = reason
            waiting: list[Future[Any]] = [*self._requests.values(), *self._calls.values(), self._ready]
            self._requests.clear()
            self._calls.clear()
        for future in waiting:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(ReplicaDiedError(reason))


def _error(kind: str, text: str) -> Exception:
    return ValueError(text) if kind == "value" else EngineError(text)


def _receive(reference: weakref.ref[LocalReplica], connection: Connection) -> None:
    """Pass messages on until the child is gone. Holds the replica weakly, so that it can be collected."""
    while True:
        try:
            message = wire.receive(connection)
        except (EOFError, OSError):
            message = None
        replica = reference()
        if replica is None:
            return
        if message is None:
            if replica._process is not None:
                replica._process.wait(GRACE_SECONDS)
            replica._fail_all(replica._why_dead())
            return
        replica._handle(*message)
        del replica


def _end_process(process: subprocess.Popen[bytes], connection: Connection, log: Path) -> None:
    """End a child and its whole group: politely, then for certain."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        wire.send(connection, ("shutdown",))
        process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    connection.close()
    log.unlink(missing_ok=True)
