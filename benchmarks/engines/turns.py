"""Engines on one machine that take turns: while one works, the processes of the others are stopped.

Idle engines poll, and would take the cores from the one that is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Self

import psutil

__all__ = ["Turns", "engine_processes", "is_engine"]

ENGINES = ("EngineCore", "VLLM::", "engine_process", "ray::_AsyncLLMEngine")
"""Texts in the command line or the name of an engine's processes."""
RAYS_OWN = ("raylet", "gcs_server")
"""Names of processes that others wait for: without them ``ray.shutdown()`` never returns."""


def is_engine(name: str, command_line: str) -> bool:
    """Whether a process belongs to an engine, and not to Ray.

    >>> is_engine("python", "VLLM::EngineCore"), is_engine("raylet", "raylet --session=VLLM::"), is_engine("sh", "sh")
    (True, False, False)
    """
    return name not in RAYS_OWN and any(word in f"{command_line} {name}" for word in ENGINES)


def engine_processes(started: set[int]) -> set[psutil.Process]:
    """Return the engine processes that are new, and add all current ones to ``started``.

    Args:
        started: pids; those that run now are added.
    """
    mine = {process.pid: process for process in psutil.process_iter() if process.pid not in started}
    started |= set(mine)
    found = set()
    for process in mine.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_engine(process.name(), " ".join(process.cmdline())):
                found.add(process)
    return found


class Turns:
    """A context: however it ends, no process stays stopped. Processes that have ended meanwhile are ignored.

    Args:
        processes: those of each engine, by its name.
    """

    def __init__(self, processes: Mapping[str, Collection[psutil.Process]]) -> None:
        self._processes = processes

    def give(self, engine: str) -> None:
        """Continue one engine, and stop the others."""
        for name, processes in self._processes.items():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if name == engine:
                        process.resume()
                    else:
                        process.suspend()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in set().union(*self._processes.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
