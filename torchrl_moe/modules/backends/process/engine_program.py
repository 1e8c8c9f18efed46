"""The program of an engine process, for any engine: it reads requests from a socket and writes completions to it.

Forked from a process that has imported the engine (``fork_server_process.py``), or started as ``python -m PROGRAM FD
DRIVER_PID``; in either case as the leader of a process group. The group never outlives the driver: end of file on the
socket, or the end of the driver's process, ends it.

Messages in: ``("configure", pickle of arguments)``, ``("generate", packed)``, ``("abort", ids)``,
``("call", number, method, parcel of kwargs)``, ``("left", driver)``, ``("shutdown",)``.
Messages out: ``("ready", info)``, ``("failed", text)``, ``("completions", packed)``, ``("refused", id, kind, text)``,
``("result", number, parcel)``, ``("error", number, kind, text)``, ``("stats", stats)``, ``("died", text)``.
"""

from __future__ import annotations

import abc
import asyncio
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from torchrl_moe.modules.backends.process import packing, wire
from torchrl_moe.modules.backends.process.parent_watch import Inbox, end_group, end_group_later
from torchrl_moe.modules.backends.process.plain import Packed
from torchrl_moe.modules.backends.process.stats_feed import Load, StatsFeed
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.backends.reports import ReplicaInfo, ReplicaStats

__all__ = ["EngineProgram", "OpenEngine", "Send", "run_engine", "run_script"]

WATCH_SECONDS = 0.5
MESSAGE_BYTES = 64 << 20  # beyond which completions continue in another one
SMALL_BYTES = 1 << 10  # of what is not an array

Send: TypeAlias = Callable[[tuple[Any, ...]], None]


class EngineProgram(abc.ABC):
    """One engine, its requests in flight, and the commands that the driver may call by name: ``command_...``.

    Args:
        info: what the replica reports about itself.
        load: updated by the engine.
        inbox: what the driver sends.
        send: sends a message to the driver.
    """

    def __init__(self, info: ReplicaInfo, load: Load, inbox: Inbox, send: Send) -> None:
        self.info = info
        self.load = load
        self._inbox = inbox
        self._send = send
        self._client_errors: tuple[type[BaseException], ...] = (ValueError, TypeError)  # the caller's fault
        self._death_reported = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._feed = StatsFeed(load, self._stats, send)

    # -- what an engine does ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def start(self, request: Request) -> None:
        """Start a request, whose completion or refusal is sent."""

    @abc.abstractmethod
    def abort(self, request_ids: list[str]) -> None:
        """Cut requests short."""

    @abc.abstractmethod
    def left(self, driver: str) -> None:
        """Note that a driver is gone."""

    @abc.abstractmethod
    def _stats(self) -> ReplicaStats:
        """Return the current stats, except the rate."""

    @abc.abstractmethod
    def _death(self) -> str:
        """Return why the engine is dead; "" while it lives."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the engine."""

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that run while the process serves."""
        return []

    # -- requests ---------------------------------------------------------------------------------------------------

    def generate(self, packed: Packed) -> None:
        """Start requests."""
        for request in packing.unpack_requests(packed):
            self.start(request)

    def _refuse(self, request_id: str, error: BaseException) -> None:
        if not self._report_death():
            self._send(("refused", request_id, *self._described(error)))

    def _described(self, error: BaseException) -> tuple[str, str]:
        """Return ``"value"`` if the caller is at fault, else ``"engine"``, and the message of an error.

        An engine may wrap an unexpected error in one without a message; then the cause's message is returned.
        """
        cause = error if error.__cause__ is None or str(error) else error.__cause__
        if isinstance(cause, self._client_errors):
            return "value", str(cause)
        return "engine", f"{type(cause).__name__}: {cause}"

    # -- commands ---------------------------------------------------------------------------------------------------

    def call(self, number: Any, method: str, kwargs: wire.Parcel) -> None:
        """Start a command; its value or its error is sent when it is done."""
        task = asyncio.get_running_loop().create_task(self._answer(method, kwargs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(partial(self._send_result, number))

    async def _answer(self, method: str, kwargs: wire.Parcel) -> wire.Parcel:
        """Run a command. Arguments are decoded here, the value by the caller: failures of both stay with the caller."""
        command = getattr(self, f"command_{method}", None)
        if command is None:
            known = sorted(name.removeprefix("command_") for name in dir(self) if name.startswith("command_"))
            raise ValueError(f"an engine process has no command {method!r}; known: {', '.join(known)}")
        return wire.parcel(await command(**wire.open_parcel(kwargs)))

    def _send_result(self, number: Any, task: asyncio.Task[wire.Parcel]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._send(("result", number, task.result()))
        elif not self._report_death():
            self._send(("error", number, *self._described(error)))

    async def command_stats(self) -> ReplicaStats:
        return self._feed.stats()

    # -- life -------------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Handle messages until the driver ends the process or goes away, or the engine dies."""
        loop = asyncio.get_running_loop()
        work = [self._watch_engine(), self._feed.run(), *self._background()]
        background = [loop.create_task(one) for one in work]
        while True:
            kind, *rest = await self._inbox.messages.get()
            if kind == "generate":
                self.generate(*rest)
            elif kind == "abort":
                self.abort(*rest)
            elif kind == "call":
                self.call(*rest)
            elif kind == "left":
                self.left(*rest)
            else:
                for task in background:
                    task.cancel()
                return

    async def _watch_engine(self) -> None:
        while not self._report_death():
            await asyncio.sleep(WATCH_SECONDS)

    def _report_death(self) -> bool:
        """Whether the engine is dead; then tell the driver once, and end. Other errors only follow from that."""
        death = "" if self._death_reported else self._death()
        if death:
            self._death_reported = True
            self._send(("died", death))
            self._inbox.put("shutdown")
        return self._death_reported


OpenEngine: TypeAlias = Callable[[dict[str, Any], Inbox, Send], Awaitable[EngineProgram]]
"""Starts an engine with the given arguments."""


def _size(message: tuple[Any, ...]) -> int:
    """Return roughly how many bytes a message occupies until it is written."""
    if message[0] == "completion":
        return SMALL_BYTES + packing.completion_bytes(message[1])
    return SMALL_BYTES + (sum(array.nbytes for array in message[2]) if message[0] == "result" else 0)


def _frame(messages: list[tuple[Any, ...]]) -> list[wire.Frames]:
    """Put completions that are ready together into one message, or a few that are not too large."""
    batches: list[list[Completion]] = []
    size = MESSAGE_BYTES
    for message in messages:
        if message[0] == "completion":
            if size >= MESSAGE_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(message[1])
            size += _size(message)
    others = [wire.encode(message) for message in messages if message[0] != "completion"]
    return [*(wire.encode(("completions", packing.pack_completions(batch))) for batch in batches), *others]


async def _opened(open_engine: OpenEngine, arguments: bytes, inbox: Inbox, send: Send) -> EngineProgram:
    return await open_engine(pickle.loads(arguments), inbox, send)


async def _main(connection: Connection, driver_is_gone: Callable[[], bool], open_engine: OpenEngine) -> None:
    outbox = wire.Outbox(connection, _frame, _size, reader="the driver")
    inbox = Inbox(connection, driver_is_gone, asyncio.get_running_loop())
    _, arguments = await inbox.messages.get()
    opened: EngineProgram | BaseException
    (opened,) = await asyncio.gather(_opened(open_engine, arguments, inbox, outbox.put), return_exceptions=True)
    if isinstance(opened, BaseException):
        traceback.print_exception(opened)
        outbox.put(("failed", f"{type(opened).__name__}: {opened}"))
        outbox.close()
        return
    gc.collect()
    gc.freeze()  # vLLM brings 600 000 objects, and a full collection of them takes 0.3 s
    inbox.serving = True
    try:
        outbox.put(("ready", opened.info))
        await opened.serve()
    finally:
        end_group_later()
        outbox.close()
        opened.close()


def run_engine(connection: Connection, driver_is_gone: Callable[[], bool], open_engine: OpenEngine) -> None:
    """Run the engine, then end the process, whatever still runs in it: engines leave threads, and the driver waits.

    Args:
        connection: the socket to the driver.
        driver_is_gone: whether the driver's process has ended.
        open_engine: starts the engine.
    """
    # Without a driver the group is orphaned; if a member is stopped, the kernel then sends SIGHUP to all of them, and
    # the process that cleans up would be gone. Ctrl-C and the like do not reach the group, so nothing is lost.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # a process that the engine forks would hold the socket open after this one has been killed
    os.register_at_fork(after_in_child=connection.close)
    code = 1
    try:
        asyncio.run(_main(connection, driver_is_gone, open_engine))
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        end_group(code)


def run_script(run: Callable[[Connection, Callable[[], bool]], None]) -> None:
    """Run as a script; its arguments are the socket's file descriptor and the driver's process id."""
    descriptor, driver = map(int, sys.argv[1:])
    run(Connection(descriptor), lambda: os.getppid() != driver)
