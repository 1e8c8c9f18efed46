"""What a service in a Ray cluster is: a name, its replicas' engine arguments, and what each asks of a node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NAMESPACE", "RayService", "forwarded_environment", "parse_actor_name"]

NAMESPACE = "torchrl_moe"
"""Ray's namespace of our actors. Each driver has one of its own, and no other driver would find them there."""

FORWARDED = ("GLOO_", "HF_", "HUGGING_FACE_", "NCCL_", "TRANSFORMERS_", "VLLM_")
OF_ONE_MACHINE = {"VLLM_HOST_IP", "VLLM_RPC_BASE_PATH"}


@dataclass(frozen=True, kw_only=True)
class RayService:
    """One service, the same for all its drivers.

    Attributes:
        name: of the service; its actors and placement groups are named after it.
        namespace: Ray's namespace of the actors.
        detached: whether it outlives the driver that made it.
        num_replicas: how many engines.
        kind: of the engine, by the name of its module.
        arguments: of the engine, by keyword, before each replica gets its seed.
        resources: what one replica asks of one node, in Ray's names: ``{"CPU": 2, "GPU": 2}``.
        verbose: whether vLLM logs at its own default level.
        log_folder: where logs stay, on each replica's node; ``None``: they go with their replicas.
    """

    name: str
    namespace: str = NAMESPACE
    detached: bool
    num_replicas: int
    kind: str
    arguments: Mapping[str, Any]
    resources: Mapping[str, float]
    verbose: bool = False
    log_folder: str | None = None

    def actor_name(self, index: int) -> str:
        """Return the name of a replica's actor."""
        return f"{self.name}-replica-{index}"


def parse_actor_name(name: str) -> tuple[str, int] | None:
    """Return the service and the index in an actor's name; ``None`` if it is not one of ours.

    >>> parse_actor_name("policy-replica-3")
    ('policy', 3)
    """
    match = re.fullmatch(r"(.+)-replica-(\d+)", name)
    return None if match is None else (match[1], int(match[2]))


def forwarded_environment() -> dict[str, str]:
    """Return what the engines get of this driver's environment: settings of vLLM and of what it loads."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(FORWARDED) and name not in OF_ONE_MACHINE
    }
