"""The toy engine as a kind, as vLLM's but for its program, this: torch, most of a start's time, stays out of that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchrl_moe.modules.backends.vllm.engine_args import (
    arguments_of,
    devices_per_replica,
    engine_environment,
    reason_not_to_fork,
    seeded,
)

if TYPE_CHECKING:
    from torchrl_moe.modules.backends.process.link import SocketStream


__all__ = ["PROGRAM", "arguments_of", "devices_per_replica", "engine_environment", "reason_not_to_fork", "seeded"]

PROGRAM = "support.toy_kind"


class Absent(ModuleType):
    """In the place of a module that is imported and not used: each of its names is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := type(name, (), {}))
        return made


def _use_toys() -> Any:
    sys.modules.setdefault("torch", Absent("torch"))
    from support import toy_engine

    toy_engine.use_toys()
    return toy_engine.engine_process


def preload() -> str:
    """There is nothing slow to import, and no reason not to fork."""
    _use_toys()
    return ""


def run(stream: SocketStream, driver_is_gone: Callable[[], bool]) -> None:
    """Our real engine process over the toy engine, forked."""
    _use_toys().run(stream, driver_is_gone)


if __name__ == "__main__":
    process = _use_toys()
    process.run_script(process.run)
