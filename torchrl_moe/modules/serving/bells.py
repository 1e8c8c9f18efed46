"""What wakes a waiting call, from any thread: one kind for threads, one for event loops, which holds no thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from torchrl_moe.modules.serving.interrupts import uninterrupted

__all__ = ["LoopBell", "ThreadBell"]


class ThreadBell:
    """Wakes the thread that waits for it. What rang before the wait counts."""

    guard = staticmethod(uninterrupted)
    """A context for steps that a Ctrl-C must not cut in two."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self, *_: object) -> None:
        """Wake it."""
        self._rung.set()

    def wait(self, seconds: float | None) -> None:
        """Wait until it rings, or for so long."""
        self._rung.wait(seconds)
        self._rung.clear()


class LoopBell:
    """Wakes a task of the event loop that it is made in."""

    guard = contextlib.nullcontext
    """Nothing to do: an event loop turns a Ctrl-C into a cancelled wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self, *_: object) -> None:
        """Wake it."""
        with contextlib.suppress(RuntimeError):  # the loop was closed under its own tasks
            self._loop.call_soon_threadsafe(self._rung.set)

    async def wait(self, seconds: float | None) -> None:
        """Wait until it rings, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        self._rung.clear()
