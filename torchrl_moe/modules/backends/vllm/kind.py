"""vLLM as a kind of engine: see :class:`~torchrl_moe.modules.backends.engine_kind.EngineKind`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torchrl_moe
from torchrl_moe._compat import METHOD_VARIABLE
from torchrl_moe.modules.backends.vllm.engine_args import arguments_of, devices_per_replica, seeded

__all__ = ["PROGRAM", "arguments_of", "devices_per_replica", "engine_environment", "reason_not_to_fork", "seeded"]

LAUNCHER = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
PROGRAM = "torchrl_moe.modules.backends.vllm.engine_process"


def engine_environment(devices: str | None = None, num_replicas: int = 1, verbose: bool = False) -> dict[str, str]:
    """Return the environment of an engine process: the driver's, plus what vLLM needs where the user was silent.

    Args:
        devices: the value of ``CUDA_VISIBLE_DEVICES``; ``None`` on a machine without GPUs.
        num_replicas: how many engines share the machine's cores.
        verbose: whether vLLM logs at its own default level.
    """
    environment = {name: value for name, value in os.environ.items() if not _is_of_launcher(name)}
    root = str(Path(torchrl_moe.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "WARNING")
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
        return environment
    # Measured on CPU: compiling vLLM's log-prob helper costs 10 s and gains nothing; binding threads to cores puts
    # every replica on the same ones; a thread more than there are free cores makes a step ten times slower.
    threads = max(((os.cpu_count() or 2) - 1) // num_replicas, 1)
    environment.setdefault("TORCH_COMPILE_DISABLE", "1")
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def _is_of_launcher(name: str) -> bool:
    """Whether a variable says which rank of a training run this is: an engine is none, and vLLM would read it."""
    return name in LAUNCHER or name.startswith("TORCHELASTIC_")


def reason_not_to_fork(environment: Mapping[str, str]) -> str:
    """Return why a process with this environment is to import vLLM itself: vLLM's own setting; else ``""``."""
    return f"{METHOD_VARIABLE}=spawn is set" if environment.get(METHOD_VARIABLE) == "spawn" else ""
