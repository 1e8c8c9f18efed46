"""A kind of engine, as the code that starts its processes sees it; ``backends/vllm/engine_args.py`` is vLLM's.

Where an engine runs (``backends/process``, ``backends/ray``) is separate from which engine it is: the code for the
former knows an engine only by its kind, and imports none of its modules.
"""

from __future__ import annotations

import importlib
import os
import site
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torchrl_moe

__all__ = ["EngineKind", "engine_kind", "find_kind", "process_environment"]

KINDS: Mapping[str, str] = {
    "vllm": "torchrl_moe.modules.backends.vllm.engine_args",
    "transformers": "torchrl_moe.modules.backends.transformers.transformers_arguments",
}
LAUNCHER = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class EngineKind(Protocol):
    """The interface of a module that describes a kind of engine; importing it imports no engine."""

    PROGRAM: str
    """The module that an engine process runs; ``backends/process/child.py`` says what it must define."""

    def arguments_of(self, engine_args: object) -> dict[str, Any]:
        """Return the engine arguments that a user passed as keywords."""

    def seeded(self, arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return the arguments of the ``number``-th replica that is made, with its own seed."""

    def devices_per_replica(self, arguments: Mapping[str, Any]) -> int:
        """Return the number of devices that one replica uses."""

    def engine_environment(
        self, devices: str | None = None, num_replicas: int = 1, verbose: bool = False
    ) -> dict[str, str]:
        """Return the environment of an engine process; see the vLLM kind for the arguments."""

    def reason_not_to_fork(self, environment: Mapping[str, str]) -> str:
        """Return why a process with this environment must import its engine itself; ``""`` if it may be forked."""


def process_environment(devices: str | None, num_replicas: int) -> dict[str, str]:
    """Return the environment of an engine process, whatever its engine: the driver's, adapted."""
    environment = {name: value for name, value in os.environ.items() if not _is_of_launcher(name)}
    root = str(Path(torchrl_moe.__file__).parents[1])
    if root not in site.getsitepackages():  # an engine finds it there anyway, and the user's own paths come first
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    # on GPUs the number of threads is left to vLLM
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
        return environment
    # measured: one thread more than there are free cores makes a step ten times slower
    threads = max(((os.cpu_count() or 2) - 1) // num_replicas, 1)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def _is_of_launcher(name: str) -> bool:
    """Whether a variable describes a rank of a training run. An engine is not one, and vLLM would read the variable."""
    return name in LAUNCHER or name.startswith("TORCHELASTIC_")


def find_kind(module: str) -> EngineKind:
    """Return the kind that a module describes; other machines get the module's name only, and call this there."""
    kind: EngineKind = importlib.import_module(module)
    return kind


def engine_kind(engine: str) -> EngineKind:
    """Return the kind of engine for a name; only its module is imported."""
    if engine not in tuple(KINDS):  # anything may come, a list too
        raise ValueError(f"engine must be one of {', '.join(KINDS)}, got {engine!r}")
    return find_kind(KINDS[engine])
