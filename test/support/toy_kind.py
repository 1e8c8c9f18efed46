"""The toy engine as a kind: as vLLM's, but for its program."""

from __future__ import annotations

from torchrl_moe.modules.backends.vllm.engine_args import (
    arguments_of,
    devices_per_replica,
    engine_environment,
    reason_not_to_fork,
    seeded,
)

__all__ = ["PROGRAM", "arguments_of", "devices_per_replica", "engine_environment", "reason_not_to_fork", "seeded"]

PROGRAM = "support.toy_program"
