"""vLLM as a kind of engine: see :class:`~torchrl_moe.modules.backends.engine_kind.EngineKind`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torchrl_moe._compat import METHOD_VARIABLE
from torchrl_moe.modules.backends.engine_kind import process_environment
from torchrl_moe.modules.backends.vllm.engine_args import RUNNER, arguments_of, check_vllm, devices_per_replica, seeded

__all__ = ["PROGRAM", "arguments_of", "devices_per_replica", "engine_environment", "reason_not_to_fork", "seeded"]

# vLLM warns on each CPU, where its kernels have functions of ours: see ``cpu_kernels``
logging.getLogger("vllm.triton_utils.importing").addFilter(
    lambda record: "doesn't include CPU backend" not in record.getMessage()
)

PROGRAM = "torchrl_moe.modules.backends.vllm.engine_process"


def engine_environment(devices: str | None = None, num_replicas: int = 1, verbose: bool = False) -> dict[str, str]:
    """Return the environment of an engine process: the driver's, plus what vLLM needs where the user has set
    nothing.
    """
    environment = process_environment(devices, num_replicas)
    check_vllm(environment)
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "WARNING")
    if devices is None:
        # Measured on CPU: compiling vLLM's log-prob helper costs 10 s and gains nothing; binding threads to cores puts
        # every replica on the same ones.
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Without Triton vLLM chooses V1 in each process that our plugin does not reach (VLLM_PLUGINS may leave it out).
        environment.setdefault(RUNNER, "1")
    return environment


def reason_not_to_fork(environment: Mapping[str, str]) -> str:
    """Return why a process with this environment must import vLLM itself: vLLM's own setting says so; else ``""``."""
    return f"{METHOD_VARIABLE}=spawn is set" if environment.get(METHOD_VARIABLE) == "spawn" else ""
