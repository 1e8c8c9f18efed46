"""A service in a Ray cluster: its name, its replicas' engine arguments, and what each asks of a node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

__all__ = [
    "NAMESPACE",
    "RayService",
    "forwarded_environment",
    "parse_actor_name",
    "parse_group_name",
    "secrets_of_environment",
]

NAMESPACE = "torchrl_moe"
"""The Ray namespace of our actors. By default each driver has its own, where no other driver would find them."""

FORWARDED = ("GLOO_", "HF_", "HUGGING_FACE_", "NCCL_", "TRANSFORMERS_", "VLLM_")
OF_ONE_MACHINE = {"VLLM_HOST_IP", "VLLM_RPC_BASE_PATH"}
SECRET = re.compile(r"TOKEN$|_KEY$|SECRET$|PASSWORD$")  # HF_TOKEN, HUGGING_FACE_HUB_TOKEN, VLLM_API_KEY


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
        log_folder: where logs are kept, on each replica's node; ``None``: they are removed with their replicas.
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

    def group_name(self, index: int, driver: str) -> str:
        """Return the name of a placement group that a driver makes for a replica; :func:`parse_group_name` reads it."""
        return "/".join(quote(part, safe="") for part in (self.namespace, self.name, str(index), driver))


def parse_actor_name(name: str) -> tuple[str, int] | None:
    """Return the service and the index in an actor's name; ``None`` if it is not one of ours.

    >>> parse_actor_name("policy-replica-3")
    ('policy', 3)
    """
    match = re.fullmatch(r"(.+)-replica-(\d+)", name)
    return None if match is None else (match[1], int(match[2]))


def parse_group_name(name: str) -> tuple[str, str, int] | None:
    """Return the namespace, the service and the index in a placement group's name; ``None`` if it is not one of ours.

    >>> parse_group_name("torchrl_moe/policy/3/d2c0ffee")
    ('torchrl_moe', 'policy', 3)
    """
    match = re.fullmatch(r"([^/]+)/([^/]+)/(\d+)/[0-9a-f]{8}", name)
    return None if match is None else (unquote(match[1]), unquote(match[2]), int(match[3]))


def forwarded_environment() -> dict[str, str]:
    """Return the variables of this driver that the engines get: settings of vLLM and of what it loads, no secrets.

    Ray stores and shows the arguments that an actor was made with.
    """
    return {name: value for name, value in _settings().items() if not SECRET.search(name)}


def secrets_of_environment() -> dict[str, str]:
    """Return the secrets of this driver, such as access tokens; the engines get them over its own connection."""
    return {name: value for name, value in _settings().items() if SECRET.search(name)}


def _settings() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(FORWARDED) and name not in OF_ONE_MACHINE
    }
