"""A replica as its driver sees it: an engine process at the other end of one socket.

:class:`EngineReplica` keeps the futures that the driver waits for, and fails them when the process is gone; it does not
know where the process runs. A :class:`LocalReplica` needs no Ray: its process is a child of the driver, see
``child.py``.
"""

from __future__ import annotations

import abc
import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import msgspec

from torchrl_moe.errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.engine_kind import EngineKind
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.child import Child, configuration
from torchrl_moe.modules.backends.replica import Completion, Replica, ReplicaInfo, ReplicaStats, Request, Tell

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
        """Return the last errors of that log, or its last lines; ``""`` where no such file is kept."""
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
            value = _value(tag, value)
            self._resolve(
                self._calls,
                number,
                self._stamped(value) if isinstance(value, list) and tag == link.COMPLETIONS else value,
            )
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


def _with_cause(message: str, tail: str) -> str:
    """Return an error's message and the end of the log; if it only points to that, after the first error there."""
    found = re.search(r"\b((?:\w+\.)*\w*(?:Error|Exception): (?!.*root cause).+)", tail)
    if "root cause" in message and found is not None:
        message = f"{found[1]} ({message.split('. ')[0].rstrip('.')})"
    return f"{message}\n{tail}"


def _value(tag: str, value: object) -> Any:
    """Return a verb's value, or the error that keeps it from being read, which is its caller's."""
    try:
        return link.untagged(tag, value)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError) as error:
        return EngineError(f"the value is not of this version: {error}")


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
