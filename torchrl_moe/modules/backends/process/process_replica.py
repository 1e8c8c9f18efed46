"""A replica as its driver sees it: an engine process at the other end of one socket.

:class:`EngineReplica` keeps the futures that the driver waits for, and fails them when the process is gone; it does not
know where the process runs. A :class:`LocalReplica` needs no Ray: its process is a :class:`Child` of the driver, which
knows no requests: how it is started and ended, its socket, its log.

A child leads a process group of its own, so a Ctrl-C at the terminal reaches the driver only, and the whole group
(vLLM starts two more processes) can be ended at once. It stays in the driver's session: Linux divides the cores among
sessions (autogroups), and ``sched_yield``, on which vLLM's polling relies, does not yield to another session. In
sessions of their own, two replicas on two cores lost a quarter of their throughput. The child, or the server that forks
it, is started by module name: the user's script is not imported again and needs no ``__main__`` guard.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import IO, Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

import msgspec

from torchrl_moe.errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.engine_kind import EngineKind
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.engine_program import DRIVER_VARIABLE, FOLDER_VARIABLE, kill_group
from torchrl_moe.modules.backends.process.fork_server import CannotFork, ForkedProcess, Launch, fork_server
from torchrl_moe.modules.backends.replica import Completion, Replica, ReplicaInfo, ReplicaStats, Request, Tell

Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"
"""The leader of its group."""

GRACE_SECONDS = 10.0
SOCKET_NAME_BYTES = 107  # of a Unix socket, by the kernel
LOG_BYTES = 1 << 18
SHOWN_LOG_LINES = 6
SHOWN_LOG_COLUMNS = 400
READY = -1  # the number of the one result that answers no call
P = ParamSpec("P")


class Link(Protocol):
    """The driver's end of an engine process; :class:`Child` is one."""

    @property
    def stream(self) -> link.Stream:
        """The messages of the process."""

    @property
    def outbox(self) -> link.Outbox:
        """The messages to it."""

    def end(self) -> None:
        """End the process, or only this driver's connection if others use it. All callers wait for that. Idempotent."""

    def end_and_forget(self) -> None:
        """:meth:`end`, and remove what was kept for a look at what went wrong."""

    def log_tail(self) -> str:
        """Return its last errors, or its last lines."""


LinkT = TypeVar("LinkT", bound=Link)
K = TypeVar("K")
T = TypeVar("T")


class EngineReplica(Replica, Generic[LinkT]):
    """See :class:`~torchrl_moe.modules.backends.replica.Replica` for the lifecycle of a replica."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._ready: Future[ReplicaInfo] = Future()
        self._requests: dict[str, Future[Completion]] = {}
        self._tell: dict[str, Tell] = {}  # of those that stream
        self._calls: dict[int, Future[Any]] = {READY: self._ready}
        self._death: str | None = None
        self._stats: ReplicaStats | None = None
        self._child: LinkT | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._child is not None:
            raise RuntimeError(f"replica {self.index} was started before: make a new one")
        self._child = child = self._open()
        # also runs at interpreter exit, if the user forgot shutdown()
        self._end = weakref.finalize(self, child.end_and_forget)
        threading.Thread(
            target=_receive, args=(weakref.ref(self), child), name=f"replica-{self.index}", daemon=True
        ).start()

    @abc.abstractmethod
    def _open(self) -> LinkT:
        """Start the process, without waiting for it."""

    @abc.abstractmethod
    def _ending(self) -> str:
        """Return how the process ended, after "replica 0"."""

    def wait_ready(self, timeout: float) -> ReplicaInfo:
        self._started()
        try:
            return self._ready.result(timeout)
        except FutureTimeout:
            raise EngineError(
                f"replica {self.index} was not ready within {timeout:.0f} s. Its log so far:\n{self._tail()}"
            ) from None

    def _started(self) -> LinkT:
        if self._child is None:
            raise RuntimeError(f"replica {self.index} was not started: call start() first")
        return self._child

    @property
    def last_stats(self) -> ReplicaStats | None:
        return self._stats

    def log_tail(self) -> str:
        return "" if self.log_path is None else self._tail()

    @property
    def death(self) -> str | None:
        return self._death

    def is_alive(self) -> bool:
        return self._child is not None and self._death is None

    def shutdown(self) -> None:
        """Ask the process to end, and end its whole group after a grace period. Idempotent."""
        if self._child is None:
            return
        self._fail_all(f"replica {self.index} was shut down")
        self._child.end()
        self._end()

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], tell: Tell | None = None) -> list[Future[Completion]]:
        """Send requests in one message; see the protocol. A request id must not be in flight already."""
        child = self._started()
        futures: list[Future[Completion]] = [Future() for _ in requests]
        sent = []
        # under the lock: a death in between would leave a future that nobody fails
        with self._lock:
            for request, future in zip(requests, futures, strict=True):
                if self._death is not None:
                    future.set_exception(ReplicaDiedError(self._death))
                elif request.request_id in self._requests:
                    future.set_exception(
                        ValueError(f"request id {request.request_id!r} is in flight already: give each one its own")
                    )
                else:
                    self._requests[request.request_id] = future
                    if request.stream and tell is not None:
                        self._tell[request.request_id] = tell
                    sent.append(request)
        if sent:
            self._send(child, sent)
        return futures

    def _send(self, child: LinkT, requests: Sequence[Request]) -> None:
        """Send requests in one message; if that cannot be encoded, each by itself, so that only those at fault fail."""
        try:
            child.outbox.put(link.message("generate", list(requests)))
        except BaseException as error:  # whatever a user's object raises as its fields are read
            # one of many is at fault: each is sent by itself
            if isinstance(error, Exception) and len(requests) > 1:
                for request in requests:
                    self._send(child, [request])
                return
            for request in requests:
                refusal = ValueError(f"the request cannot be sent to the engine process: {error}")
                self._resolve(self._requests, request.request_id, refusal)
            if not isinstance(error, Exception):
                raise

    def abort(self, request_ids: Sequence[str]) -> None:
        if self._death is None:
            self._started().outbox.put(link.message("abort", list(request_ids)))

    # -- verbs ------------------------------------------------------------------------------------------------------

    def ask(
        self, verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        child = self._started()
        number = next(self._numbers)
        frames = link.message("call", (number, verb.__name__, args, kwargs))
        future: Future[T] = Future()
        # one that its caller no longer waits for is forgotten, answered or not
        future.add_done_callback(lambda _: self._calls.pop(number, None))
        with self._lock:
            death = self._death
            if death is None:
                self._calls[number] = future
        if death is None:
            child.outbox.put(frames)
        else:
            future.set_exception(ReplicaDiedError(death))
        return future

    # -- plumbing ---------------------------------------------------------------------------------------------------

    def _handle(self, kind: str, body: Any) -> None:
        """Act on one message of the process, in the receiver thread."""
        if kind == "completions":
            for completion in self._stamped(body):
                self._resolve(self._requests, completion.request_id, completion)
        elif kind == "refused":
            self._resolve(self._requests, body[0], _error(*body[1:]))
        elif kind == "parts":
            self._tell_parts(self._stamped(body))
        elif kind == "result":
            number, tag, value = body
            try:
                value = link.untagged(tag, value)
                if tag == link.COMPLETIONS:
                    self._stamped(value)
            except (msgspec.MsgspecError, ValueError, TypeError, LookupError) as error:  # it is this call's alone
                value = EngineError(f"the value is not of this version: {error}")
            self._resolve(self._calls, number, value)
        elif kind == "error":
            self._resolve(self._calls, body[0], _error(*body[1:]))
        elif kind == "stats":
            self._stats = body
        elif kind == "ready":
            self._resolve(self._calls, READY, body)
        elif kind == "failed":
            self._fail_all(f"replica {self.index} did not start: {_with_cause(body, self._tail())}")
        else:
            self._fail_all(f"replica {self.index} died: {_with_cause(body, self._tail())}")

    def _tell_parts(self, parts: list[Completion]) -> None:
        """Pass parts on, together; a part may come after the whole, and is then nobody's."""
        wanted: dict[Tell, list[Completion]] = {}
        with self._lock:
            for part in parts:
                if (tell := self._tell.get(part.request_id)) is not None:
                    wanted.setdefault(tell, []).append(part)
        for tell, of_one in wanted.items():
            tell(of_one)

    def _stamped(self, completions: list[Completion]) -> list[Completion]:
        for completion in completions:
            completion.metrics.replica = self.index
        return completions

    def _resolve(self, table: dict[K, Future[T]], key: K, value: T | Exception) -> None:
        with self._lock:
            future = table.pop(key, None)
            if isinstance(key, str):
                self._tell.pop(key, None)
        if future is not None and future.set_running_or_notify_cancel():
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)

    def _fail_all(self, reason: str) -> None:
        """Fail everything that waits; the first reason stays."""
        # from here on, submit and _ask fail by themselves
        with self._lock:
            if self._death is not None:
                return
            self._death = reason
            waiting: list[Future[Any]] = [*self._requests.values(), *self._calls.values()]
            self._requests.clear()
            self._tell.clear()
            self._calls.clear()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ReplicaDiedError(reason))

    def _tail(self) -> str:
        return self._started().log_tail()

    def _lost(self, unread: str) -> None:
        """Note that nothing comes from the process any more; ``unread`` says why what came was no message."""
        if self._death is None:
            if unread:
                reason = f"sent what is no message: {unread}\n{self._tail()}"
            elif self._started().outbox.overflowed:
                reason = "did not keep up with what it was sent"
            else:
                reason = self._ending()
            self._fail_all(f"replica {self.index} {reason}")


def _with_cause(message: str, tail: str) -> str:
    """Return an error's message and the end of the log; if it only points to that, after the first error there."""
    found = re.search(r"\b((?:\w+\.)*\w*(?:Error|Exception): (?!.*root cause).+)", tail)
    if "root cause" in message and found is not None:
        message = f"{found[1]} ({message.split('. ')[0].rstrip('.')})"
    return f"{message}\n{tail}"


def _error(kind: str, text: str) -> Exception:
    return ValueError(text) if kind == "value" else EngineError(text)


def _receive(reference: weakref.ref[EngineReplica[Any]], child: Link) -> None:
    """Handle messages until the process is gone, then clean up. The replica is held weakly: it may be collected."""
    unread = ""
    try:
        while True:
            try:
                kind, _, body = link.read(child.stream)
            except EOFError:
                break
            except OSError as error:
                unread = "" if error.errno else str(error)  # the system numbers its own errors; these are of the link
                break
            replica = reference()
            if replica is None:
                break
            replica._handle(kind, body)
            del body, replica
    finally:
        # end the group first: a caller that learns of its death must find its memory free
        child.end()
        if (replica := reference()) is not None:
            replica._lost(unread)
        child.outbox.close()
        child.stream.close()


# -- a child of the driver --------------------------------------------------------------------------------------------


def configuration(arguments: Mapping[str, object]) -> link.Frames:
    """Return the first message to a child: its engine's arguments, pickled.

    They may be objects of the engine's own classes. Nothing else is sent to it as a pickle, and this one goes no
    further than to a process of the same user on the same machine, which the sender started.
    """
    return link.message("configure", pickle.dumps(dict(arguments)))


class Child:
    """One engine process.

    Where that is safe, it is forked from a process that has imported the engine already. Otherwise it is started on its
    own, and the log says why. It may still be starting when the constructor returns.
    """

    def __init__(
        self,
        index: int,
        kind: EngineKind,
        environment: Mapping[str, str],
        log_folder: Path | None = None,
        fork: bool = True,
    ) -> None:
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"torchrl_moe-replica-{index}-"))
        self.log = self.folder / "log" if log_folder is None else log_folder / f"replica-{index}.log"
        self._kind = kind
        self._driver = os.getpid()
        self._launched: Future[Process] = Future()
        self._cancelled = False
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder)
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            log = stack.enter_context(self.log.open("ab"))
            self._log_start = log.tell()
            self._launch = self._begin(environment, theirs, log, fork)
            stack.pop_all()
        self.stream = link.SocketStream(ours)
        self.outbox = link.Outbox(self.stream, reader=f"the engine process of replica {index}")
        self._lock = threading.RLock()  # the finalizer of a replica may run in the very thread that ends the child
        self._ended = False

    def _begin(
        self, environment: Mapping[str, str], engine: socket.socket, log: IO[bytes], fork: bool
    ) -> Launch | None:
        """Start the process, or have it forked, for which a thread waits. Closes both files."""
        _engines_ends.add(engine)
        places = _with_places(environment, self.folder)
        # forked, unless the caller or the kind is against it
        launch, reason = None, self._kind.reason_not_to_fork(environment) if fork else ""
        if fork and not reason:
            try:
                launch = fork_server(self._kind.PROGRAM, environment).fork(engine.fileno(), log.fileno(), places)
            except CannotFork as error:
                reason = str(error)
        # else started by module name, and the log says why
        if launch is None:
            with engine, log:
                self._launched.set_result(self._spawn(places, engine, log, reason))
            return None
        # the server may still be importing, for seconds: a thread waits for the process
        arguments = (launch, places, engine, log)
        threading.Thread(target=self._wait_for_fork, args=arguments, name="launch", daemon=True).start()
        return launch

    def _wait_for_fork(
        self, launch: Launch, environment: Mapping[str, str], engine: socket.socket, log: IO[bytes]
    ) -> None:
        with engine, log:
            try:
                try:
                    process: Process = launch.wait()
                except CannotFork as error:
                    if self._cancelled:
                        raise
                    process = self._spawn(environment, engine, log, str(error))
                self._launched.set_result(process)
            except BaseException as error:  # noqa: BLE001  callers raise it, whatever it is: they would wait forever
                self._launched.set_exception(error)

    def _spawn(self, environment: Mapping[str, str], engine: socket.socket, log: IO[bytes], reason: str) -> Process:
        if reason:
            log.write(f"torchrl_moe: this replica imports its engine itself: {reason}\n".encode())
            log.flush()
        return subprocess.Popen(
            [sys.executable, "-m", self._kind.PROGRAM, str(engine.fileno()), str(os.getpid())],
            pass_fds=[engine.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    @property
    def process(self) -> Process:
        """The process; waits until it is there."""
        return self._launched.result()

    def ending(self) -> str:
        """Return how it ended, after "replica 0"."""
        if error := self._launched.exception():
            return f"could not be started: {type(error).__name__}: {error}"
        code = self.process.poll()
        return "closed its socket" if code is None else f"ended with exit code {code}"

    def is_alive(self) -> bool:
        """Whether the process runs, or is still being started."""
        if not self._launched.done():
            return True
        return self._launched.exception() is None and self.process.poll() is None

    def end(self) -> None:
        """End the process and its group: ask it, kill them after a grace period. Idempotent; all callers wait for the
        end.

        Does nothing in a process that the driver forked, which runs Python's finalizers at its own end.
        """
        if os.getpid() != self._driver:
            return
        with self._lock:
            if self._ended:
                return
            self._ended = True  # for the same thread; others wait for the lock
            try:
                # a start that is in progress is cancelled; the process may appear all the same
                if self._launch is not None and not self._launched.done():
                    self._cancelled = True
                    self._launch.cancel()
                # it may end politely; then the whole group goes, since an engine starts processes of its own
                if self._launched.exception() is None:
                    self.outbox.put(link.message("shutdown"))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(GRACE_SECONDS)
                    kill_group(self.process.pid)
                    self.process.wait()
                self.outbox.close(1.0)
            except BaseException:  # Ctrl-C: it may be ended again
                self._ended = False
                raise

    def end_and_forget(self) -> None:
        """End it and remove its folder."""
        self.end()
        if os.getpid() == self._driver:
            shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self, lines: int = SHOWN_LOG_LINES) -> str:
        """Return the last errors that the process printed, or its last lines if it printed none."""
        try:
            with self.log.open("rb") as log:
                # only what this child printed: a user's file also holds the logs of earlier ones
                log.seek(max(log.seek(0, os.SEEK_END) - LOG_BYTES, self._log_start))
                text = [line[:SHOWN_LOG_COLUMNS] for line in log.read().decode(errors="replace").splitlines()]
        except FileNotFoundError:  # removed at the end
            return "(no log)"
        errors = [line for line in text if "Error" in line and "See root cause above" not in line]
        shown = errors or [line for line in text if "WARNING" not in line and "shards:" not in line]
        return "\n".join(shown[-lines:]) or "(its log holds no error)"


_engines_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # of sockets; open while the engine is being started


def _close_engines_ends() -> None:
    """Close them in a process that the driver forks: while it held one, the death of that engine would not show."""
    for engine in list(_engines_ends):
        engine.close()


os.register_at_fork(after_in_child=_close_engines_ends)


def _with_places(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Make vLLM create its files and sockets, which it leaves behind, in a folder that is removed.

    Only if the sockets' names then fit the kernel's limit. The user may choose another place for sockets.
    """
    ours = {**environment, FOLDER_VARIABLE: str(folder), DRIVER_VARIABLE: str(os.getpid())}
    if len(os.fsencode(folder / str(uuid.uuid4()))) <= SOCKET_NAME_BYTES:
        ours["TMPDIR"] = str(folder)
        ours.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    return ours


class LocalReplica(EngineReplica[Child]):
    """A replica whose engine process is a child of the driver."""

    def __init__(
        self,
        index: int,
        kind: EngineKind,
        arguments: Mapping[str, object],
        environment: Mapping[str, str],
        log_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(index)
        self._kind = kind
        self._arguments = dict(arguments)
        self._environment = dict(environment)
        self._log_folder = None if log_folder is None else Path(log_folder)

    def _open(self) -> Child:
        configure = configuration(self._arguments)
        child = Child(self.index, self._kind, self._environment, self._log_folder)
        child.outbox.put(configure)
        return child

    @property
    def log_path(self) -> Path | None:
        """The file that the child prints to; ``None`` before :meth:`start`."""
        return None if self._child is None else self._child.log

    def is_alive(self) -> bool:
        return super().is_alive() and self._started().is_alive()

    def _ending(self) -> str:
        return f"{self._started().ending()}. Its last log lines:\n{self._tail()}"
