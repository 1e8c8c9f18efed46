"""The actor: a :class:`ReplicaHost` on a node that Ray chose, with the devices that Ray gave it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from torchrl_moe.modules.backends.engine_kind import find_kind
from torchrl_moe.modules.backends.ray.cluster import RayService
from torchrl_moe.modules.backends.ray.replica_host import Address, ReplicaHost

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """An actor's description of itself: where it listens, its placement group, the service that it belongs to."""

    address: Address
    group: PlacementGroup
    service: RayService


def actor_environment(service: RayService, forwarded: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine process in an actor: the node's, then the driver's settings.

    Without GPUs, it has one thread for each CPU that Ray reserved.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "") if service.resources.get("GPU") else None
    kind = find_kind(service.kind)
    environment = {**kind.engine_environment(devices, verbose=service.verbose), **forwarded}
    if devices is None:
        environment["OMP_NUM_THREADS"] = str(max(int(service.resources.get("CPU", 1)), 1))
    return environment


class ReplicaActor(ReplicaHost):
    def __init__(
        self,
        index: int,
        service: RayService,
        forwarded: Mapping[str, str],
        group: PlacementGroup,
        number: int,
        awaits_secrets: bool = False,
    ) -> None:
        self._group = group
        self._service = service
        environment = actor_environment(service, forwarded)
        folder = None if service.log_folder is None else Path(service.log_folder)
        # a restarted engine must not draw the random numbers of the first one again
        if ray.get_runtime_context().was_current_actor_reconstructed:
            number += secrets.randbelow(1 << 20)
        kind = find_kind(service.kind)
        arguments = kind.seeded(service.arguments, number)
        super().__init__(index, kind, arguments, environment, ray.util.get_node_ip_address(), folder, awaits_secrets)

    def describe(self) -> Description:
        """Return what a driver must know."""
        return Description(address=self.address(), group=self._group, service=self._service)

    def _engine_died(self) -> None:
        """End this actor if its service outlives its drivers; Ray then restarts it."""
        if self._service.detached:
            self.end()
            os._exit(1)
