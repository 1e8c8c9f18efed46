"""The program of an engine process, for any engine: it reads requests from a socket and writes completions to it.

Forked from a process that has imported the engine (``fork_server.py``), or started as ``python -m PROGRAM FD
DRIVER_PID``; in either case as the leader of a process group. The group never outlives the driver: end of file on the
socket, or the end of the driver's process, ends it.

Messages in, by kind: ``configure`` (a pickle of the engine's arguments), ``generate`` (requests), ``abort`` (their
ids), ``call`` (number, verb, arguments), ``left`` (a driver is gone), ``shutdown``.
Messages out: ``ready`` (info), ``failed`` (text), ``completions``, ``parts``, ``refused`` (request id, kind, text),
``result`` (number, value), ``error`` (number, kind of error, text), ``stats``, ``died`` (text).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import gc
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TypeAlias

import psutil

from torchrl_moe.modules.backends.engine import CALLER, Engine
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.link import SocketStream
from torchrl_moe.modules.backends.replica import Completion, ReplicaInfo, ReplicaStats, Request

# -- stats -------------------------------------------------------------------------------------------------------------
# They are sent unasked, a few times a second when they have changed. The driver keeps the last ones, so reading them
# costs the engine nothing.


FEED_SECONDS = 0.25
RATE_READINGS = 5  # the rate is that of the last second


@dataclasses.dataclass(slots=True)
class Load:
    """The engine's report of its last step, and counts since it started; :class:`ReplicaStats` explains all but one.

    ``tokens`` counts generated tokens as they are made, not when their request ends.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_at: float = 0.0
    requests: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    generation_seconds: float = 0.0

    def count(self, request: Request, completion: Completion, seconds: float, kept: int) -> None:
        """Count a request that is over; ``kept`` of its tokens were there before."""
        self.requests += 1
        if request.scoring is None:  # else its one token belongs to no answer
            self.completions += len(completion.outputs)
            self.generated_tokens += sum(len(output.token_ids) for output in completion.outputs) - kept
        self.prompt_tokens += len(completion.prompt_token_ids)
        self.cached_tokens += completion.num_cached_tokens
        self.generation_seconds += seconds

    def stats(self, weights_version: int, busy: bool) -> ReplicaStats:
        """Return it as stats. An engine may report at its steps only, and an idle one takes none."""
        values = dataclasses.asdict(self)
        del values["tokens"]
        idle = {} if busy else {"running": 0, "waiting": 0, "cache_usage": 0.0}
        return ReplicaStats(**{**values, **idle}, weights_version=weights_version)


class StatsFeed:
    """Sends stats that have changed, and adds the rate at which tokens are generated."""

    def __init__(
        self,
        load: Load,
        read: Callable[[], ReplicaStats],
        send: Callable[[ReplicaStats], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._read = read
        self._send = send
        self._clock = clock
        self._sent: ReplicaStats | None = None
        self._readings: deque[tuple[float, int]] = deque([(clock(), load.tokens)], RATE_READINGS)
        self._rate = 0.0

    def stats(self) -> ReplicaStats:
        """Return the current stats."""
        return dataclasses.replace(self._read(), tokens_per_second=self._rate)

    def tick(self) -> None:
        """Take a reading, and send the stats if they are not those sent before."""
        self._readings.append((self._clock(), self._load.tokens))
        (first_at, first), (last_at, last) = self._readings[0], self._readings[-1]
        self._rate = (last - first) / (last_at - first_at) if last_at > first_at else 0.0
        stats = self.stats()
        if stats != self._sent:
            self._sent = stats
            self._send(stats)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(FEED_SECONDS)


# -- what ties the process to its driver -------------------------------------------------------------------------------
# Messages arrive here, and the whole process group ends when no more can. The process must be the leader of its group,
# as :class:`LocalReplica` starts it. vLLM's own processes, which are in the group too, watch both the leader and the
# driver (:func:`end_with_leader`).

WATCH_SECONDS = 0.5
EXIT_SECONDS = 8.0  # that the process gets to end by itself; less than the driver's patience
KILL_ROUNDS, KILL_SECONDS = 100, 0.01
ORPHANED_SECONDS = 0.05
FOLDER_VARIABLE = "TORCHRL_MOE_REPLICA_FOLDER"  # of log and sockets
DRIVER_VARIABLE = "TORCHRL_MOE_DRIVER"  # its process id
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # only its exit code is still to be read
TRACKER = "multiprocessing.resource_tracker"


class Inbox:
    """Reads the driver's messages in its own thread, and ends the group when the driver ends.

    A driver is gone at end of file, or when ``driver_is_gone`` says so: a process that it forked may hold its end of
    the socket open. While the engine starts, it occupies the event loop, so the group is then ended at once.
    """

    def __init__(
        self, stream: SocketStream, driver_is_gone: Callable[[], bool], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.messages: asyncio.Queue[link.Message] = asyncio.Queue()
        self.serving = False
        self._stream = stream
        self._driver_is_gone = driver_is_gone
        self._loop = loop
        self._ended = threading.Event()
        for task in (self._read, self._watch_driver):
            threading.Thread(target=task, name="inbox", daemon=True).start()

    def put(self, message: link.Message) -> None:
        """Add a message from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the reader
            self._loop.call_soon_threadsafe(self.messages.put_nowait, message)

    def _read(self) -> None:
        try:
            while (message := self._next())[0] != "shutdown":
                self.put(message)
        except (EOFError, OSError):
            time.sleep(ORPHANED_SECONDS)  # a dying driver's socket closes before its process is gone
            return
        except ValueError as error:
            print(f"torchrl_moe: this engine ends: what its driver sent is no message: {error}", flush=True)
            return
        finally:
            self._end()

    def _next(self) -> link.Message:
        """Return the next message; of one that cannot be read, what is wrong with it, and whose it is.

        In Ray one driver may be of another release: that is its own end, not the engine's.
        """
        frames = self._stream.receive()
        kind, driver = link.head_of(frames)
        try:
            return kind, driver, link.decode(frames[1:])
        except ValueError as error:
            if not driver:
                raise
            return "unreadable", driver, str(error)

    def _watch_driver(self) -> None:
        while not self._driver_is_gone():
            if self._ended.wait(WATCH_SECONDS):
                return
        self._end()

    def _end(self) -> None:
        self._ended.set()
        if not self.serving:
            end_group()
        end_group_later()
        self.put(SHUTDOWN)


def end_group(code: int = 1) -> None:
    """Kill this process and everything that it started, at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():  # else it was run by hand, in a shell's group
        kill_group(os.getpid())
    folder, driver = os.environ.get(FOLDER_VARIABLE), os.environ.get(DRIVER_VARIABLE)
    if folder and driver and not _is_gone(os.getpid()) and _is_gone(int(driver)):  # else the driver removes it
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def end_group_later() -> None:
    """End the group in a few seconds, unless it ends by itself before: with a stuck event loop it does not."""
    timer = threading.Timer(EXIT_SECONDS, end_group)
    timer.daemon = True
    timer.start()


def kill_group(leader: int) -> None:
    """Kill a process group, except the caller and Python's resource tracker.

    The tracker ends by itself when the others are gone, and removes the shared memory that they left behind: vLLM's
    processes leave some even after a clean exit.
    """
    for _ in range(KILL_ROUNDS):  # a member may fork while it is killed; one that waits for a disk dies later
        members = _members(leader)
        if not members:
            return
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        time.sleep(KILL_SECONDS)


def end_with_leader() -> None:
    """Have this process, which is not the leader, end the group once both the leader and its driver are gone.

    The leader ends the group when the driver dies, and the driver when the leader does; but both may be killed at once,
    and vLLM's engine core would run on forever. Does nothing in a process that no driver started, or where processes
    cannot be inspected.
    """
    leader, folder, driver = os.getpgrp(), os.environ.get(FOLDER_VARIABLE), os.environ.get(DRIVER_VARIABLE)
    if _is_gone(os.getpid()):  # there is no /proc
        return
    if folder and driver and leader not in (0, os.getpid()):  # 0: it is outside this process's namespace
        threading.Thread(target=_watch, args=({leader, int(driver)}, folder), name="parent_watch", daemon=True).start()


def _watch(keepers: set[int], folder: str) -> None:
    while keepers := {pid for pid in keepers if not _is_gone(pid)}:
        time.sleep(WATCH_SECONDS)
    try:
        kill_group(os.getpgrp())
    except OSError:  # no file can be opened any more
        os.killpg(0, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in ENDED
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OSError):  # unknown: too many files are open, for example
        return False


def _members(leader: int) -> list[psutil.Process]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # it is gone
            if pid == os.getpid() or os.getpgid(pid) != leader:
                continue
            process = psutil.Process(pid)
            if process.status() not in ENDED and TRACKER not in " ".join(process.cmdline()):
                found.append(process)
    return found


MESSAGE_BYTES = 64 << 20  # beyond which completions continue in another one
SMALL_BYTES = 1 << 10  # of what is not an array

SHUTDOWN: link.Message = ("shutdown", "", None)
SEPARATOR = "/"  # between a driver's name and its own request id

Send: TypeAlias = Callable[[link.Message], None]
"""Sends a message to a driver; one that names none goes to all."""


class EngineProgram(Engine):
    """One engine and its requests in flight, of any number of drivers."""

    def __init__(self, info: ReplicaInfo, load: Load, inbox: Inbox, send: Send) -> None:
        super().__init__()
        self.info = info
        self.load = load
        self._inbox = inbox
        self._send = send
        self._client_errors: tuple[type[BaseException], ...] = (ValueError, TypeError)  # the caller's fault
        self._death_reported = False
        self._failure: BaseException | None = None  # of a coroutine that should run on
        self._tasks: set[asyncio.Task[None]] = set()  # verbs that run; the loop alone would not keep them
        self._open: dict[str, set[str]] = {}  # driver -> its requests in flight, by the engine's ids
        self._gone: set[str] = set()  # drivers that have left
        self._feed = StatsFeed(load, self._stats, lambda stats: send(("stats", "", stats)))

    # -- what an engine does, besides its verbs -----------------------------------------------------------------------

    @abc.abstractmethod
    def start(self, request: Request) -> None:
        """Start a request; then call :meth:`deliver` or :meth:`refuse`, once. What is raised here refuses it, too."""

    @abc.abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """Cut requests short."""

    @abc.abstractmethod
    async def _snapshot(self) -> list[Completion]:
        """Return what each request in flight has so far."""

    @abc.abstractmethod
    def _stats(self) -> ReplicaStats:
        """Return the current stats, except the rate."""

    def _death(self) -> str:
        """Return why the engine is dead; "" while it lives."""
        error = self._failure
        return "" if error is None else f"its engine failed: {type(error).__name__}: {error}"

    def close(self) -> None:
        """End the engine, if it is more than this process."""

    def _background(self) -> list[Coroutine[object, None, None]]:
        """Return the coroutines that run while the process serves; the engine is dead if one fails."""
        return []

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            self._failure = error
            self._report_death()

    async def stats(self) -> ReplicaStats:
        return self._feed.stats()

    # -- requests: the engine knows each by an id that no other driver uses -------------------------------------------

    def _generate(self, driver: str, requests: Sequence[Request]) -> None:
        for request in requests:
            name = f"{driver}{SEPARATOR}{request.request_id}"
            self._open.setdefault(driver, set()).add(name)
            try:
                self.start(dataclasses.replace(request, request_id=name))
            except Exception as error:  # noqa: BLE001  of one request: the others run on
                self.refuse(name, error)

    def deliver(self, completion: Completion) -> None:
        """Send a completion to the driver that asked for it."""
        driver, own = self._whose(completion.request_id)
        completion.request_id = own
        self._send(("completions", driver, completion))

    def tell(self, parts: Sequence[Completion]) -> None:
        """Send parts of answers to the drivers that asked for them."""
        of_drivers: dict[str, list[Completion]] = {}
        for part in parts:
            driver, _, part.request_id = part.request_id.partition(SEPARATOR)
            of_drivers.setdefault(driver, []).append(part)
        for driver, of_one in of_drivers.items():
            self._send(("parts", driver, of_one))

    def refuse(self, request_id: str, error: BaseException) -> None:
        """Report to its driver that a request failed."""
        driver, own = self._whose(request_id)
        if not self._report_death():
            kind, text = self._described(error)
            self._send(("refused", driver, (own, kind, text.replace(repr(request_id), repr(own)))))

    def _whose(self, request_id: str) -> tuple[str, str]:
        """Note that a request is over; return its driver, and its id there."""
        driver, _, own = request_id.partition(SEPARATOR)
        self._open.get(driver, set()).discard(request_id)
        return driver, own

    def _left(self, driver: str) -> None:
        """Note that a driver is gone: nobody would take its answers, and its claim to the weights ends."""
        self._gone.add(driver)
        self.abort(sorted(self._open.pop(driver, ())))
        self.owner.give_up(driver)

    async def snapshot(self) -> list[Completion]:
        whose = CALLER.get() + SEPARATOR
        found = [one for one in await self._snapshot() if one.request_id.startswith(whose)]
        return [dataclasses.replace(one, request_id=one.request_id.removeprefix(whose)) for one in found]

    def _described(self, error: BaseException) -> tuple[str, str]:
        """Return ``"value"`` if the caller is at fault, else ``"engine"``, and the message of an error.

        An engine may wrap an unexpected error in one without a message; then the cause's message is returned.
        """
        cause = error if error.__cause__ is None or str(error) else error.__cause__
        if isinstance(cause, self._client_errors):
            return "value", str(cause)
        return "engine", f"{type(cause).__name__}: {cause}"

    # -- verbs ------------------------------------------------------------------------------------------------------

    async def _call(
        self, driver: str, number: int, verb: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Run a verb, and send its value or its error."""
        CALLER.set(driver)
        try:
            method = None if verb.startswith("_") else getattr(self, verb, None)
            if not asyncio.iscoroutinefunction(method):
                raise ValueError(f"an engine has no verb {verb!r}")
            value = await method(*args, **kwargs)
            if driver in self._gone:  # a claim that had to wait is nobody's
                self.owner.give_up(driver)
            # encoded here, so that a failure of that is the verb's error
            frames = link.message("result", (number, *link.tagged(value)), driver)
        except Exception as error:  # noqa: BLE001  of one verb: its caller gets it
            if not self._report_death():
                self._send(("error", driver, (number, *self._described(error))))
        else:
            self._send(("encoded", driver, frames))

    # -- life -------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Handle messages until the driver ends the process or goes away, or the engine dies."""
        loop = asyncio.get_running_loop()
        background = [loop.create_task(one) for one in (self._watch_engine(), self._feed.run(), *self._background())]
        for task in background:
            task.add_done_callback(self._note_failure)
        while True:
            kind, driver, body = await self._inbox.messages.get()
            if kind == "generate":
                self._generate(driver, body)
            elif kind == "abort":
                self.abort([f"{driver}{SEPARATOR}{own}" for own in body])
            elif kind == "call":
                task = loop.create_task(self._call(driver, *body))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif kind == "left":
                self._left(driver)
            elif kind == "unreadable":
                self._send(("died", driver, f"its engine cannot read what this driver sends: {body}"))
            else:
                for task in background:
                    task.cancel()
                return

    async def _watch_engine(self) -> None:
        while not self._report_death():
            await asyncio.sleep(WATCH_SECONDS)

    def _report_death(self) -> bool:
        """Whether the engine is dead; then report that to the driver once, and end. Others follow from that."""
        death = "" if self._death_reported else self._death()
        if death:
            self._death_reported = True
            self._send(("died", "", death))
            self._inbox.put(SHUTDOWN)
        return self._death_reported


OpenEngine: TypeAlias = Callable[[dict[str, object], Inbox, Send], Awaitable[EngineProgram]]
"""Starts an engine with the given arguments."""


def _size(message: link.Message) -> int:
    """Return roughly how many bytes a message occupies until it is written."""
    kind, _, body = message
    if kind == "completions":
        return SMALL_BYTES + link.completion_bytes(body)
    if kind == "parts":
        return sum(SMALL_BYTES + link.completion_bytes(part) for part in body)
    return SMALL_BYTES + (sum(len(frame) for frame in body) if kind == "encoded" else 0)


def _frame(messages: Sequence[link.Message]) -> list[link.Frames]:
    """Put a driver's completions that are ready together into one message, or a few that are not too large."""
    batches: list[tuple[str, list[Completion]]] = []
    of_driver: dict[str, tuple[list[Completion], int]] = {}  # its last batch, and the bytes in it
    others: list[link.Frames] = []
    for message in messages:
        kind, driver, body = message
        if kind == "completions":
            batch, size = of_driver.get(driver, ([], MESSAGE_BYTES))
            if size >= MESSAGE_BYTES:
                batch, size = [], 0
                batches.append((driver, batch))
            batch.append(body)
            of_driver[driver] = batch, size + _size(message)
        else:
            others.append(body if kind == "encoded" else link.message(kind, body, driver))
    return [*(frames for driver, batch in batches for frames in _encoded(driver, batch)), *others]


def _encoded(driver: str, batch: list[Completion]) -> list[link.Frames]:
    """Return the message of a batch; if that cannot be encoded, one for each answer: only those at fault fail."""
    try:
        return [link.message("completions", batch, driver)]
    except ValueError as error:
        if len(batch) > 1:
            return [frames for one in batch for frames in _encoded(driver, [one])]
        return [link.message("refused", (batch[0].request_id, "engine", f"its answer cannot be sent: {error}"), driver)]


async def _main(stream: SocketStream, driver_is_gone: Callable[[], bool], open_engine: OpenEngine) -> None:
    outbox = link.Outbox(stream, _frame, _size, reader="the driver")
    inbox = Inbox(stream, driver_is_gone, asyncio.get_running_loop())
    _, _, arguments = await inbox.messages.get()
    try:
        program = await open_engine(pickle.loads(arguments), inbox, outbox.put)
    except Exception as error:  # noqa: BLE001  whatever it is: the driver says why there is no engine
        traceback.print_exception(error)
        outbox.put(("failed", "", f"{type(error).__name__}: {error}"))
        outbox.close()
        return
    gc.collect()
    gc.freeze()  # vLLM brings 600 000 objects, and a full collection of them takes 0.3 s
    inbox.serving = True
    try:
        outbox.put(("ready", "", program.info))
        await program._serve()
    finally:
        end_group_later()
        outbox.close()
        program.close()


def run_engine(stream: SocketStream, driver_is_gone: Callable[[], bool], open_engine: OpenEngine) -> None:
    """Run the engine, then end the process, whatever still runs in it: engines leave threads, and the driver waits."""
    # Without a driver the group is orphaned; if a member is stopped, the kernel then sends SIGHUP to all of them, and
    # the process that cleans up would be gone. Ctrl-C and the like do not reach the group, so nothing is lost.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # a process that the engine forks would hold the socket open after this one has been killed
    os.register_at_fork(after_in_child=stream.close)
    code = 1
    try:
        asyncio.run(_main(stream, driver_is_gone, open_engine))
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        end_group(code)


def run_script(run: Callable[[SocketStream, Callable[[], bool]], None]) -> None:
    """Run as a script; its arguments are the socket's file descriptor and the driver's process id."""
    descriptor, driver = map(int, sys.argv[1:])
    run(SocketStream(socket.socket(fileno=descriptor)), lambda: os.getppid() != driver)
