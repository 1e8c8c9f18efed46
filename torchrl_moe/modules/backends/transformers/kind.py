"""Plain transformers as a kind of engine: see :class:`~torchrl_moe.modules.backends.engine_kind.EngineKind`."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_moe.modules.backends.engine_kind import process_environment
from torchrl_moe.modules.backends.transformers.engine_args import arguments_of, seeded

__all__ = ["PROGRAM", "arguments_of", "devices_per_replica", "engine_environment", "reason_not_to_fork", "seeded"]

PROGRAM = "torchrl_moe.modules.backends.transformers.engine_process"


def devices_per_replica(arguments: Mapping[str, object]) -> int:
    """Return 1: a replica computes on one device, whatever the arguments."""
    del arguments
    return 1


def engine_environment(devices: str | None = None, num_replicas: int = 1, verbose: bool = False) -> dict[str, str]:
    """Return the environment of an engine process: the driver's, and the log level of transformers."""
    environment = process_environment(devices, num_replicas)
    environment.setdefault("TRANSFORMERS_VERBOSITY", "info" if verbose else "warning")
    return environment


def reason_not_to_fork(environment: Mapping[str, str]) -> str:
    """Return ``""``: a process may always be forked from one that has imported transformers."""
    del environment
    return ""
