"""A kind of engine, as the code that starts its processes sees it; ``backends/vllm/engine_args.py`` is vLLM's.

Where an engine runs (``backends/process``, ``backends/ray``) is separate from which engine it is: the code for the
former knows an engine only by its kind, and imports none of its modules.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torchrl_moe

KINDS: Mapping[str, str] = {
    "vllm": "torchrl_moe.modules.backends.vllm.engine_args",
    "transformers": "torchrl_moe.modules.backends.transformers.transformers_arguments",
}
LAUNCHER = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class EngineKind:
    """A kind of engine: a module's own functions, and the ones here where it has none; importing it imports no engine.

    ``PROGRAM`` is the module that an engine process runs: it has ``preload``, ``run`` and a ``main`` part. A user's
    engine is its own program.
    """

    def __init__(self, module: ModuleType) -> None:
        self.name = module.__name__  # other machines get no more than this
        self.PROGRAM: str = getattr(module, "PROGRAM", self.name)
        self.__dict__.update({name: getattr(module, name) for name in OPTIONAL if hasattr(module, name)})

    def arguments_of(self, engine_args: object) -> dict[str, Any]:
        """Return the engine arguments that a user passed as keywords."""
        if not isinstance(engine_args, Mapping):
            raise TypeError(f"engine={self.name!r} takes its arguments as a mapping, got {engine_args!r}")
        return dict(engine_args)

    def seeded(self, arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return the arguments of the ``number``-th replica that is made, with its own seed if it takes one."""
        del number
        return dict(arguments)

    def devices_per_replica(self, arguments: Mapping[str, Any]) -> int:
        """Return the number of devices that one replica uses."""
        del arguments
        return 1

    def engine_environment(
        self, devices: str | None = None, num_replicas: int = 1, verbose: bool = False
    ) -> dict[str, str]:
        """Return the environment of an engine process; see the vLLM kind for the arguments.

        With this process's import path, so that the module is found.
        """
        del verbose
        environment = process_environment(devices, num_replicas)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), *sys.path]))
        return environment

    def reason_not_to_fork(self, environment: Mapping[str, str]) -> str:
        """Return why a process with this environment must import its engine itself; else ``preload`` decides."""
        del environment
        return ""


OPTIONAL = tuple(name for name in vars(EngineKind) if not name.startswith("_"))


def with_own_seed(arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    """:meth:`EngineKind.seeded` of an engine with a ``seed``.

    With equal random numbers, two replicas would give a group the same answers, and so would a restarted one.
    """
    return {**arguments, "seed": (arguments.get("seed") or 0) + number} if number else dict(arguments)


def process_environment(devices: str | None, num_replicas: int) -> dict[str, str]:
    """Return the environment of an engine process, whatever its engine: the driver's, adapted."""
    # an engine is no rank of a training run, and vLLM would read what describes this one
    is_rank = {name for name in os.environ if name in LAUNCHER or name.startswith("TORCHELASTIC_")}
    environment = {name: value for name, value in os.environ.items() if name not in is_rank}
    root = str(Path(torchrl_moe.__file__).parents[1])
    if root not in site.getsitepackages():  # an engine finds it there anyway, and the user's own paths come first
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    # on GPUs the number of threads is left to vLLM
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
        return environment
    environment.setdefault("OMP_NUM_THREADS", str(threads_on_a_cpu(num_replicas)))
    return environment


def threads_on_a_cpu(num_replicas: int) -> int:
    """Return how many threads a local replica has where ``OMP_NUM_THREADS`` is not set."""
    # measured: one thread more than there are free cores makes a step ten times slower
    return max(((os.cpu_count() or 2) - 1) // num_replicas, 1)


def find_kind(module: str) -> EngineKind:
    """Return the kind that a module describes."""
    found = importlib.import_module(module)
    for name in () if hasattr(found, "PROGRAM") else ("preload", "run"):
        if not callable(getattr(found, name, None)):
            raise ValueError(f"engine={module!r} has no function {name}(): docs/engines.md shows what an engine needs")
    return EngineKind(found)


def engine_kind(engine: str) -> EngineKind:
    """Return the kind of engine for a name, ``"vllm"``, ``"transformers"`` or a user's module; it alone is imported."""
    if engine in tuple(KINDS):  # anything may come, a list too
        return find_kind(KINDS[engine])
    if not isinstance(engine, str) or not all(map(str.isidentifier, engine.split("."))):
        raise ValueError(f"engine must be one of {', '.join(KINDS)}, or a module of yours, got {engine!r}")
    try:
        return find_kind(engine)
    except ModuleNotFoundError as error:
        known = ", ".join(KINDS)
        raise ValueError(f"engine must be one of {known}, or a module of yours, got {engine!r}: {error}") from error
