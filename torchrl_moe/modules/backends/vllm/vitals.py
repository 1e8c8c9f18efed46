"""How an engine is, seen from the process that owns it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_moe.modules.backends.replica import Vitals

__all__ = ["VitalSigns"]

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class VitalSigns:
    """Pings an engine core, and reads what its processes do: those that descend from this one.

    Args:
        engine: the ``AsyncLLM``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._ping: asyncio.Task[Any] | None = None

    async def read(self, seconds: float) -> Vitals:
        """Ping the core, which gets so many seconds to answer. One that did not yet is not asked again.

        Several drivers may ask at the same time; they share the ping.
        """
        ping = self._ping
        if ping is None:
            self._ping = ping = asyncio.get_running_loop().create_task(self._engine.is_paused())
        await asyncio.wait({ping}, timeout=seconds)
        answered = ping.done()
        if answered:
            ping.exception()  # an error is an answer too
            if self._ping is ping:
                self._ping = None
        processes = list(_descendants(os.getpid()))
        return Vitals(
            core_answered=answered,
            stopped=any(process.state == "T" for process in processes),
            cpu_seconds=sum(process.cpu_ticks for process in processes) / TICKS_PER_SECOND,
        )


@dataclass(frozen=True, slots=True)
class _Process:
    """A process, its parent, its state as the kernel calls it, and the clock ticks that it has computed."""

    pid: int
    parent: int
    state: str
    cpu_ticks: int


def _processes() -> Iterator[_Process]:
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it is gone
            continue
        yield _Process(pid, int(fields[1]), fields[0], int(fields[11]) + int(fields[12]))


def _descendants(ancestor: int) -> Iterator[_Process]:
    children: dict[int, list[_Process]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process)
    family = list(children.get(ancestor, ()))
    while family:
        process = family.pop()
        family += children.get(process.pid, ())
        yield process
