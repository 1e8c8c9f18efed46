"""The event loop of a service, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["EventLoop", "wake"]


class EventLoop:
    """An asyncio loop that runs from its first use until it is stopped or forgotten.

    Args:
        name: of its thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        # the thread holds this and not the loop's owner: a service that its user forgot is collected
        self._state = _State()
        self._end = weakref.finalize(self, self._state.stop)

    def call(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Have the loop call a function soon, from any thread; false if it was stopped, and never will."""
        state = self._state
        with state.lock:
            if state.is_over:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=state.run, name=self._name, daemon=True)
                state.runs = True  # before it does: a Ctrl-C may come while it starts
                try:
                    self._thread.start()
                except RuntimeError:  # there are too many threads; the next call tries again
                    self._thread, state.runs = None, False
                    raise
            state.loop.call_soon_threadsafe(function, *arguments)
            return True

    def stop(self) -> None:
        """Stop it, after what it was told to call before. Idempotent."""
        self._end()

    def join(self, seconds: float) -> None:
        """Wait until its thread has ended, or for so long; not in that thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)


class _State:
    """The loop, and whether it takes calls."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.lock = threading.RLock()  # a garbage collection may stop the loop in the middle of a call
        self.is_over = False
        self.runs = False

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        with self.lock:
            self.is_over = True
        self.loop.run_until_complete(asyncio.sleep(0))  # what was called between
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    def stop(self) -> None:
        with self.lock:
            if not self.is_over and self.runs:
                self.loop.call_soon_threadsafe(self.loop.stop)
            elif not self.is_over:
                self.is_over = True
                self.loop.close()


def wake(loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[None]) -> None:
    """End a wait in another loop, from any thread. Nothing happens if that loop was closed under its own tasks."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_end_wait, waiting)


def _end_wait(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():  # cancelled
        waiting.set_result(None)
