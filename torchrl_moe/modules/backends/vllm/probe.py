"""The health of an engine, as the process that owns it sees it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import psutil

from torchrl_moe.modules.backends.replica import ProbeReport

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["EngineProbe"]


class EngineProbe:
    """Pings an engine core, and reads the state and CPU time of its processes, the descendants of this one."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._ping: asyncio.Task[bool] | None = None

    async def read(self, seconds: float) -> ProbeReport:
        """Ping the core, which gets ``seconds`` to answer. While a ping is unanswered, no other is sent.

        Several drivers may ask at the same time; they share the ping.
        """
        ping = self._ping
        if ping is None:
            self._ping = ping = asyncio.get_running_loop().create_task(self._engine.is_paused())
        await asyncio.wait({ping}, timeout=seconds)
        answered = ping.done()
        if answered:
            ping.exception()  # an error is a reply, too
            if self._ping is ping:
                self._ping = None
        stopped, cpu_seconds = _what_they_do()
        return ProbeReport(core_answered=answered, stopped=stopped, cpu_seconds=cpu_seconds)


def _what_they_do() -> tuple[bool, float]:
    """Return whether one of this process's descendants is stopped, and the CPU seconds of all."""
    stopped, seconds = False, 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            times = process.cpu_times()
            seconds += times.user + times.system
            stopped |= process.status() == psutil.STATUS_STOPPED
    return stopped, seconds
