"""How a service makes its replicas: a function of their index, one for each backend.

A replica that died is made again by the same function. The backends are imported here only when they are asked for.
"""

from __future__ import annotations

import itertools
import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torchrl_moe.modules.backends.replica import Replica
from torchrl_moe.modules.serving.devices import device_sets, visible_devices

__all__ = ["ReplicaFactory", "local_factory", "ray_factory"]

ReplicaFactory: TypeAlias = Callable[[int], Replica]


def local_factory(
    arguments: Mapping[str, Any],
    num_replicas: int,
    verbose: bool,
    log_folder: str | os.PathLike[str] | None = None,
) -> ReplicaFactory:
    """Return what makes child processes of this one, each with GPUs of its own.

    Raises:
        ValueError: there are GPUs, but too few.
    """
    from torchrl_moe.modules.backends.vllm.engine_args import devices_per_replica, seeded
    from torchrl_moe.modules.backends.vllm.local_replica import LocalReplica, engine_environment

    sets = device_sets(visible_devices(), num_replicas, devices_per_replica(arguments))

    numbers = itertools.count()

    def make(index: int) -> Replica:
        environment = engine_environment(sets[index], num_replicas, verbose)
        return LocalReplica(index, seeded(arguments, next(numbers)), environment, log_folder)

    return make


def ray_factory(
    arguments: Mapping[str, Any],
    num_replicas: int,
    *,
    name: str | None,
    namespace: str | None,
    resources: Mapping[str, float] | None,
    verbose: bool,
    log_folder: str | os.PathLike[str] | None = None,
) -> ReplicaFactory:
    """Join the Ray cluster, or start one, and return what makes replicas there, or joins those that run.

    Args:
        arguments: keywords of vLLM's ``AsyncEngineArgs``.
        num_replicas: how many engines.
        name: makes it outlive this process; ``None``: it ends with it.
        namespace: of Ray; ``None``: our own.
        resources: what a replica asks of one node; ``None``: a CPU for each device, and a GPU if the cluster has any.
        verbose: whether vLLM logs at its own default level.
        log_folder: where logs stay, on each replica's node; ``None``: they go with their replicas.
    """
    from torchrl_moe.modules.backends.ray.cluster import default_resources, join_cluster
    from torchrl_moe.modules.backends.ray.ray_replica import RayReplica
    from torchrl_moe.modules.backends.ray.ray_service import NAMESPACE, RayService
    from torchrl_moe.modules.backends.vllm.engine_args import devices_per_replica

    if join_cluster() and name is not None:
        warnings.warn(
            f"no Ray cluster was found, so one was started that ends with this process, and the service {name!r} with "
            "it. Start one with `ray start --head` for a service that outlives its driver.",
            stacklevel=4,
        )
    asked = default_resources(devices_per_replica(arguments)) if resources is None else resources
    service = RayService(
        name=name or f"torchrl_moe-{uuid.uuid4().hex[:8]}",
        namespace=namespace or NAMESPACE,
        detached=name is not None,
        num_replicas=num_replicas,
        arguments=dict(arguments),
        resources={key: float(amount) for key, amount in asked.items()},
        verbose=verbose,
        log_folder=None if log_folder is None else os.fspath(log_folder),
    )
    numbers = itertools.count()
    return lambda index: RayReplica(index, service, next(numbers))
