"""The event loop of a service, in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import cached_property
from typing import Any, TypeVar, TypeVarTuple

from torchrl_moe.errors import EngineError

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
HEALTH_SECONDS = 1.0


class EventLoop:
    """An asyncio loop that runs from its first use until it is stopped or garbage collected."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        # the thread holds this and not the loop's owner, so that an unused service can be garbage collected
        self._state = _State()
        self._end = weakref.finalize(self, self._state.stop)

    def call(self, function: Callable[[*Arguments], object], *arguments: *Arguments) -> bool:
        """Schedule a call in the loop, from any thread; return False if it will never run.

        It was stopped then, or belongs to a process that this one was forked from.
        """
        state = self._state
        if state.process != os.getpid():
            return False
        with state.lock:
            if state.is_over:
                return False
            if self._thread is None:
                thread = threading.Thread(target=state.run, name=self._name, daemon=True)
                state.runs = True  # before a Ctrl-C can come between
                try:
                    thread.start()
                except RuntimeError:  # no more threads can be started now
                    state.runs = False
                    raise
                self._thread = thread  # if a Ctrl-C came before this, the next call starts one that ends at once
            state.loop.call_soon_threadsafe(function, *arguments)
            return True

    @property
    def is_here(self) -> bool:
        return self._thread is threading.current_thread()

    def run(self, function: Callable[[*Arguments], T], *arguments: *Arguments, patience: float) -> T:
        """Return a function's result, run in the loop; not from the loop's own thread, which would wait for itself."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001  the caller raises it
                future.set_exception(error)

        if not self.call(call):
            self.join(patience)
            if self._thread is not None and self._thread.is_alive():
                raise RuntimeError(f"the loop has not stopped within {patience:g} s")
            call()  # nothing else touches what the function does
        return self.result(future)

    def result(self, future: Future[T], check: Callable[[], object] = lambda: None) -> T:
        """Wait for a future that calls in the loop fulfil, and return its result; ``check`` may end the wait."""
        while not wait([future], HEALTH_SECONDS).done:
            check()
            if self._thread is not None and not self._thread.is_alive() and not future.done():
                raise RuntimeError(f"the thread {self._name!r} has ended, and nothing will answer this call")
        return future.result()

    def where(self) -> str:
        """Return the line that its thread is at."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "no thread"
        return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"

    def spawn(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Run a coroutine in the loop, from any thread; it is cancelled, and its future, when the loop stops."""
        future: Future[T] = Future()
        if not self.call(self._state.spawn, coroutine, future):
            coroutine.close()
            _cancel(future)
        return future

    def stop(self) -> None:
        """Stop it, after the calls scheduled before. Idempotent."""
        self._end()

    def join(self, seconds: float) -> None:
        """Wait until its thread has ended, or until the timeout; not in that thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)


class _State:
    """The loop, and whether it takes calls."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.lock = threading.RLock()  # a garbage collection may stop the loop in the middle of a call
        self.is_over = False
        self.runs = False  # or will, as soon as its thread does
        self.stops = False  # was asked to
        self.has_thread = False
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio itself does not keep them alive

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, made at its first use: a forked child that exits closes an unused one, and its parent's epoll."""
        return asyncio.new_event_loop()

    def spawn(self, coroutine: Coroutine[object, object, T], future: Future[T]) -> None:
        def end(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if task.cancelled() or future.cancelled():
                _cancel(future)
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(end)

    def run(self) -> None:
        with self.lock:
            if self.has_thread:
                return
            self.has_thread = True
        asyncio.set_event_loop(self.loop)
        goes_on = True
        while goes_on:
            try:
                self.loop.run_forever()
                goes_on = False
            except BaseException as error:  # noqa: BLE001  asyncio raises a task's SystemExit here, too
                LOG.warning("a task of user code raised %r; its loop goes on", error)
                goes_on = not self.stops
        with self.lock:
            self.is_over = True
        self.loop.run_until_complete(asyncio.sleep(0))  # what was called between
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    def stop(self) -> None:
        if self.process != os.getpid():
            return
        with self.lock:
            self.stops = True
            if not self.is_over and self.runs:
                self.loop.call_soon_threadsafe(self.loop.stop)
            elif not self.is_over:
                self.is_over = True
                if "loop" in vars(self):  # no thread could be started for it
                    self.loop.close()


def _cancel(future: Future[Any]) -> None:
    """Cancel a future, and wake who waits for it: ``cancel()`` alone does not wake ``wait`` and ``as_completed``."""
    future.cancel()
    future.set_running_or_notify_cancel()


class NoThreadError(EngineError):
    """The system starts no more threads at the moment; nothing of what was asked for was done."""


async def in_thread(name: str, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Return the result of a blocking call, made in a daemon thread of its own.

    A pool would make the start of one engine wait for that of others, and the end of the process for both.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a cancelled wait does not cancel the call

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001  the caller raises it; some would end the loop
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if is_plain else RuntimeError(f"it raised {error!r}"))

    try:
        threading.Thread(target=call, name=name, daemon=True).start()
    except RuntimeError as error:
        raise NoThreadError(str(error)) from error
    return await asyncio.wrap_future(future)


def tell(loop: asyncio.AbstractEventLoop, function: Callable[[T], object], value: T) -> None:
    """Call a function in another loop, from any thread, in the order of calls; nothing happens if it was closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, value)


def end_wait(waiting: asyncio.Future[None]) -> None:
    """End a wait in this loop, unless it was cancelled."""
    if not waiting.done():
        waiting.set_result(None)
