"""How an engine is, seen from the process that owns it."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from torchrl_moe.modules.backends.replica import Vitals
from torchrl_moe.modules.backends.vllm.lifeline import group_members

__all__ = ["VitalSigns"]

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class VitalSigns:
    """Pings an engine core, and reads what its processes do.

    Args:
        engine: the ``AsyncLLM``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._ping: asyncio.Task[Any] | None = None

    async def read(self, seconds: float) -> Vitals:
        """Ping the core, which gets so many seconds to answer. One that did not yet is not asked again."""
        if self._ping is None:
            self._ping = asyncio.get_running_loop().create_task(self._engine.is_paused())
        await asyncio.wait({self._ping}, timeout=seconds)
        answered = self._ping.done()
        if answered:
            self._ping.exception()  # an error is an answer too
            self._ping = None
        others = group_members(os.getpgrp())
        return Vitals(
            core_answered=answered,
            stopped=any(member.state == "T" for member in others),
            cpu_seconds=sum(member.cpu_ticks for member in others) / TICKS_PER_SECOND,
        )
