"""How a service is launched: arguments checked, GPUs shared out, and the function that makes its replicas.

A replica that died is made again by the same function. The backends are imported here only when they are asked for.
"""

from __future__ import annotations

import itertools
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeAlias, cast

import torch

from torchrl_moe.modules.backends.engine_kind import EngineKind
from torchrl_moe.modules.backends.replica import Replica

__all__ = [
    "TIMEOUT_VARIABLE",
    "ReplicaFactory",
    "check_backend",
    "check_model",
    "default_timeout",
    "device_sets",
    "local_factory",
    "ray_factory",
    "visible_devices",
    "with_fp32_head",
]

ReplicaFactory: TypeAlias = Callable[[int], Replica]

TIMEOUT_VARIABLE = "TORCHRL_VLLM_TIMEOUT_SECONDS"  # TorchRL's name
DEFAULT_TIMEOUT_SECONDS = 600.0


# -- arguments ---------------------------------------------------------------------------------------------------------


def with_fp32_head(overrides: Any) -> dict[str, Any]:
    """Return ``hf_overrides`` by which vLLM computes the last layer in float32."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ValueError("enable_fp32_output needs hf_overrides to be a mapping: have yours set head_dtype='float32'")
    return {**(overrides or {}), "head_dtype": "float32"}


def check_backend(backend: str, num_replicas: int, **of_ray: Any) -> None:
    """Refuse an unknown backend, no replica, and arguments that only Ray knows where it is not asked for."""
    if backend not in ("local", "ray"):
        raise ValueError(f"backend must be 'local' (child processes of this one) or 'ray' (actors), got {backend!r}")
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
    if backend == "local" and (given := [name for name, value in of_ray.items() if value is not None]):
        raise ValueError(f"{', '.join(given)} given with backend='local': only backend='ray' knows them")


def default_timeout() -> float:
    """Return the seconds that a start has, as the environment says."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"the environment's {TIMEOUT_VARIABLE} must be a number of seconds, got {text!r}") from None


def check_model(path: str) -> str:
    """Refuse a folder without a model before any process is started; a hub name is vLLM's business."""
    looks_local = os.path.isabs(path) or path.startswith(".") or os.path.isdir(path)
    if looks_local and not os.path.isfile(os.path.join(path, "config.json")):
        state = "has no config.json" if os.path.isdir(path) else "does not exist"
        raise ValueError(f"no model at {path!r}: the folder {state}. Save one with model.save_pretrained(path).")
    return path


# -- devices -----------------------------------------------------------------------------------------------------------


def visible_devices() -> list[str]:
    """Return the names of the CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` spells them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if named is None else [name.strip() for name in named.split(",")]
    return names[:count]


def device_sets(visible: list[str], num_replicas: int, per_replica: int) -> list[str | None]:
    """Return one value of ``CUDA_VISIBLE_DEVICES`` per replica; ``None`` for all of them on a machine without GPUs.

    Raises:
        ValueError: there are GPUs, but too few.

    >>> device_sets(["0", "1", "2", "3"], num_replicas=2, per_replica=2)
    ['0,1', '2,3']
    >>> device_sets([], num_replicas=2, per_replica=1)
    [None, None]
    """
    if not visible:
        return [None] * num_replicas
    if num_replicas * per_replica > len(visible):
        raise ValueError(
            f"{num_replicas} replicas of {per_replica} GPU(s) need {num_replicas * per_replica}, but {len(visible)} "
            f"are visible ({', '.join(visible)}). Use fewer replicas or a smaller tensor_parallel_size."
        )
    return [",".join(visible[i * per_replica : (i + 1) * per_replica]) for i in range(num_replicas)]


# -- replicas ----------------------------------------------------------------------------------------------------------


def local_factory(
    kind: EngineKind,
    arguments: Mapping[str, Any],
    num_replicas: int,
    verbose: bool,
    log_folder: str | os.PathLike[str] | None = None,
    listed: Callable[[], Iterable[int]] = tuple,
) -> ReplicaFactory:
    """Return what makes child processes of this one, each with GPUs of its own.

    Args:
        kind: of the engine: a module.
        arguments: of the engine, by keyword.
        num_replicas: how many engines to begin with; they share the machine's cores.
        verbose: whether vLLM logs at its own default level.
        log_folder: where logs stay; ``None``: they go with their replicas.
        listed: returns the indices of the replicas that there are, once some were added: those that are not among
            them need their GPUs no more.

    Raises:
        ValueError: there are GPUs, but too few; also when a replica is made for which none are left.
    """
    from torchrl_moe.modules.backends.process.replica import LocalReplica

    visible, per_replica = visible_devices(), kind.devices_per_replica(arguments)
    device_sets(visible, num_replicas, per_replica)
    places = {index: index for index in range(num_replicas)}  # which set of devices a replica has
    numbers = itertools.count()

    def devices_of(index: int) -> str | None:
        if index not in places:
            taken = {places[other] for other in listed() if other in places}
            places[index] = next(place for place in itertools.count() if place not in taken)
        return device_sets(visible, places[index] + 1, per_replica)[-1]

    def make(index: int) -> Replica:
        environment = kind.engine_environment(devices_of(index), num_replicas, verbose)
        return LocalReplica(index, kind, kind.seeded(arguments, next(numbers)), environment, log_folder)

    return make


def ray_factory(
    kind: EngineKind,
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
        kind: of the engine: a module.
        arguments: of the engine, by keyword.
        num_replicas: how many engines.
        name: makes it outlive this process; ``None``: it ends with it.
        namespace: of Ray; ``None``: our own.
        resources: what a replica asks of one node; ``None``: a CPU for each device, and a GPU if the cluster has any.
        verbose: whether vLLM logs at its own default level.
        log_folder: where logs stay, on each replica's node; ``None``: they go with their replicas.

    Raises:
        ValueError: the arguments hold an access token.
    """
    if isinstance(arguments.get("hf_token"), str):
        raise ValueError(
            "hf_token: Ray keeps and shows what actors are made with. Leave it out, and set HF_TOKEN in the "
            "environment of this process, which sends it to the replicas by its own connections."
        )
    from torchrl_moe.modules.backends.ray.cluster import default_resources, join_cluster
    from torchrl_moe.modules.backends.ray.ray_replica import RayReplica
    from torchrl_moe.modules.backends.ray.ray_service import NAMESPACE, RayService

    if join_cluster() and name is not None:
        warnings.warn(
            f"no Ray cluster was found, so one was started that ends with this process, and the service {name!r} with "
            "it. Start one with `ray start --head` for a service that outlives its driver.",
            stacklevel=4,
        )
    asked = default_resources(kind.devices_per_replica(arguments)) if resources is None else resources
    service = RayService(
        name=name or f"torchrl_moe-{uuid.uuid4().hex[:8]}",
        namespace=namespace or NAMESPACE,
        detached=name is not None,
        num_replicas=num_replicas,
        kind=cast(ModuleType, kind).__name__,
        arguments=dict(arguments),
        resources={key: float(amount) for key, amount in asked.items()},
        verbose=verbose,
        log_folder=None if log_folder is None else os.fspath(log_folder),
    )
    numbers = itertools.count()
    return lambda index: RayReplica(index, service, next(numbers))
