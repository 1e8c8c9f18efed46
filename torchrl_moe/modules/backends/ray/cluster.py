"""The Ray cluster: joined if there is one, started if there is none; which services run in it, and what it has."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.exceptions import RayError

from torchrl_moe._errors import EngineError
from torchrl_moe.modules.backends.ray.ray_service import NAMESPACE, RayService, parse_actor_name

__all__ = ["check_free", "default_resources", "find_service", "join_cluster", "running_services", "shortage"]

ASK_SECONDS = 20.0


def join_cluster(start: bool = True) -> bool:
    """Make sure that this process is in a Ray cluster; return whether one was started for it.

    A Ray that runs in this process is used as it is. Else the cluster of ``RAY_ADDRESS`` or of this machine is joined.
    Else one is started, which ends with this process. None is ever shut down here.

    Raises:
        EngineError: there is none, and none is to be started.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address="auto")
    except ConnectionError as error:
        if not start:
            raise EngineError(
                "no Ray cluster was found: this process is in none, none runs on this machine, and RAY_ADDRESS names "
                "none. Set RAY_ADDRESS, or call ray.init(address=...) first."
            ) from error
        ray.init(address="local", include_dashboard=False)
        return True
    return False


def default_resources(devices: int) -> dict[str, float]:
    """Return what a replica over so many devices asks of a node: a CPU with each GPU, or CPUs only if there is none."""
    cpus = {"CPU": float(devices)}
    return {**cpus, "GPU": float(devices)} if ray.cluster_resources().get("GPU") else cpus


def shortage(asked: Mapping[str, float]) -> str:
    """Say what a replica waits for: what was asked of one node, what the nodes have, what is free."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = any(all(node.get(name, 0.0) >= amount for name, amount in asked.items()) for node in nodes)
    free = ray.available_resources()
    has = "; ".join(str({name: node.get(name, 0.0) for name in asked}) for node in nodes)
    return (
        f"It waits for a node with {dict(asked)} free. The cluster's {len(nodes)} node(s) have {has}; free in all are "
        f"{ {name: free.get(name, 0.0) for name in asked} }. "
        + ("Others hold them: end those, or use fewer replicas." if fits else "No node is large enough.")
        + " resources={...} says what a replica asks for."
    )


def running_services(namespace: str) -> dict[str, list[int]]:
    """Return the services of a namespace: name -> the replicas that have an actor."""
    found: dict[str, list[int]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        parsed = parse_actor_name(actor["name"])
        if parsed is not None and actor["namespace"] == namespace:
            found.setdefault(parsed[0], []).append(parsed[1])
    return {name: sorted(indices) for name, indices in sorted(found.items())}


def _describe(namespace: str) -> str:
    """Return the services of a namespace in words."""
    services = running_services(namespace)
    listed = ", ".join(f"{name!r} ({len(indices)} replica(s))" for name, indices in services.items())
    return f"In namespace {namespace!r} run: {listed}." if services else f"In namespace {namespace!r} runs none."


def check_free(name: str, namespace: str | None) -> None:
    """Refuse the name of a service that runs.

    Raises:
        EngineError: it does.
    """
    namespace = namespace or NAMESPACE
    if name in running_services(namespace):
        raise EngineError(
            f"a service {name!r} is running already. {_describe(namespace)} AsyncVLLM.connect({name!r}) joins "
            "it; its shutdown() ends it; or take another name."
        )


def find_service(name: str, namespace: str | None) -> RayService:
    """Join the cluster and return a service that runs there.

    Raises:
        EngineError: there is no cluster, no such service, or it does not answer.
    """
    namespace = namespace or NAMESPACE
    join_cluster(start=False)
    indices = running_services(namespace).get(name)
    if not indices:
        raise EngineError(
            f"no service {name!r} is running. {_describe(namespace)} "
            f"AsyncVLLM.launch(..., backend='ray', name={name!r}) starts one."
        )
    reason = ""
    for index in indices:
        try:
            actor = ray.get_actor(f"{name}-replica-{index}", namespace)
            service: RayService = ray.get(actor.describe.remote(), timeout=ASK_SECONDS).service
            return service
        except (RayError, ValueError) as error:
            reason = str(error)
    raise EngineError(f"service {name!r}: none of its replicas {indices} answered within {ASK_SECONDS:g} s: {reason}")
