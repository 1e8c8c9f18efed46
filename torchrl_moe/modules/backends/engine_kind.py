"""A kind of engine, as the code that starts its processes knows it; ``backends/vllm/kind.py`` is vLLM's.

Where an engine runs (``backends/process``, ``backends/ray``) and which engine that is are two things: the former know
an engine by its kind alone, and import nothing of it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torchrl_moe

__all__ = ["EngineKind", "find_kind", "process_environment"]

LAUNCHER = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class EngineKind(Protocol):
    """What a module that describes a kind of engine has; importing it imports no engine."""

    PROGRAM: str
    """The module that an engine process runs; see ``backends/process/child.py`` for what it must have."""

    def arguments_of(self, engine_args: Any) -> dict[str, Any]:
        """Return the engine arguments that a user passed as keywords."""

    def seeded(self, arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return the arguments of the replica that is the ``number``-th to be made: with a seed of its own."""

    def devices_per_replica(self, arguments: Mapping[str, Any]) -> int:
        """Return over how many devices one replica spreads."""

    def engine_environment(
        self, devices: str | None = None, num_replicas: int = 1, verbose: bool = False
    ) -> dict[str, str]:
        """Return the environment of an engine process; see the vLLM kind for the arguments."""

    def reason_not_to_fork(self, environment: Mapping[str, str]) -> str:
        """Return why a process with this environment is to import its engine itself; ``""`` if it may be forked."""


def process_environment(devices: str | None, num_replicas: int) -> dict[str, str]:
    """Return the driver's environment for an engine process, whatever its engine.

    Args:
        devices: the value of ``CUDA_VISIBLE_DEVICES``; ``None`` on a machine without GPUs.
        num_replicas: how many engines share the machine's cores.
    """
    environment = {name: value for name, value in os.environ.items() if not _is_of_launcher(name)}
    root = str(Path(torchrl_moe.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
        return environment
    # measured: a thread more than there are free cores makes a step ten times slower
    threads = max(((os.cpu_count() or 2) - 1) // num_replicas, 1)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def _is_of_launcher(name: str) -> bool:
    """Whether a variable says which rank of a training run this is: an engine is none, and vLLM reads it."""
    return name in LAUNCHER or name.startswith("TORCHELASTIC_")


def find_kind(module: str) -> EngineKind:
    """Return the kind that a module describes: its name crosses to other machines, where this is called again."""
    kind: EngineKind = importlib.import_module(module)
    return kind
