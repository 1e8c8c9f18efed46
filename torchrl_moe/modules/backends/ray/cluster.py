"""The Ray cluster: joined if there is one, started if there is none; its services and its resources."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from torchrl_moe.errors import EngineError

# A service in a Ray cluster: its name, its replicas' engine arguments, and what each asks of a node.


NAMESPACE = "torchrl_moe"
"""The Ray namespace of our actors. By default each driver has its own, where no other driver would find them."""

FORWARDED = ("GLOO_", "HF_", "HUGGING_FACE_", "NCCL_", "TRANSFORMERS_", "VLLM_")
OF_ONE_MACHINE = {"VLLM_HOST_IP", "VLLM_RPC_BASE_PATH"}
SECRET = re.compile(r"TOKEN$|_KEY$|SECRET$|PASSWORD$")  # HF_TOKEN, HUGGING_FACE_HUB_TOKEN, VLLM_API_KEY


@dataclass(frozen=True, kw_only=True)
class RayService:
    """One service, the same for all its drivers."""

    name: str
    namespace: str = NAMESPACE
    detached: bool
    num_replicas: int
    kind: str
    arguments: Mapping[str, object]
    resources: Mapping[str, float]
    verbose: bool = False
    log_folder: str | None = None

    def actor_name(self, index: int) -> str:
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


ASK_SECONDS = 20.0
MAKING_SECONDS = 2.0  # between a group and its actor, a running driver takes milliseconds
END_SECONDS = 15.0  # more than the engine processes get to end
GONE_SECONDS = 10.0
PLACED = "CREATED"  # Ray's state of a placement group that has its node


def join_cluster(start: bool = True) -> bool:
    """Make sure that this process is in a Ray cluster; return whether one was started for it.

    A Ray that runs in this process is used as it is. Else the cluster of ``RAY_ADDRESS`` or of this machine is joined.
    Else one is started, which ends with this process. None is ever shut down here.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address="auto")
    except ConnectionError as error:
        if not start:
            raise EngineError(
                "no Ray cluster was found: this process is in none, none runs on this machine, and RAY_ADDRESS names "
                "none. Set RAY_ADDRESS to the address of one."
            ) from error
        ray.init(address="local", include_dashboard=False)
        return True
    return False


def own_address() -> str:
    """Return this node's address, by which the others reach it."""
    return str(ray.util.get_node_ip_address())


def default_resources(devices: int) -> dict[str, float]:
    """Return what a replica over ``devices`` devices asks of a node: a CPU with each GPU, or only CPUs without GPUs."""
    cpus = {"CPU": float(devices)}
    return {**cpus, "GPU": float(devices)} if ray.cluster_resources().get("GPU") else cpus


def shortage(asked: Mapping[str, float]) -> str:
    """Say what a replica waits for: what was asked of one node, what the nodes have, what is free."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = any(all(node.get(name, 0.0) >= amount for name, amount in asked.items()) for node in nodes)
    free = ray.available_resources()
    has = "; ".join(str({name: node.get(name, 0.0) for name in asked}) for node in nodes)
    return (
        f"It waits for a node with {dict(asked)} free. The cluster's {len(nodes)} node(s) have {has}; free in total: "
        f"{ {name: free.get(name, 0.0) for name in asked} }. "
        + ("Others hold them: end those, or use fewer replicas." if fits else "No node is large enough.")
        + " resources={...} sets what a replica asks for."
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
    """Return a sentence that lists the services of a namespace."""
    services = running_services(namespace)
    listed = ", ".join(f"{name!r} ({len(indices)} replica(s))" for name, indices in services.items())
    return f"Services in namespace {namespace!r}: {listed}." if services else f"None runs in namespace {namespace!r}."


def check_free(name: str, namespace: str | None) -> None:
    """Refuse the name of a service that runs, and remove what a killed driver has left of one."""
    namespace = namespace or NAMESPACE
    remove_leftovers(name, namespace)
    if name in running_services(namespace):
        raise EngineError(
            f"a service {name!r} is running already. {_describe(namespace)} AsyncVLLM.connect({name!r}) joins "
            "it; its shutdown() ends it; or take another name."
        )


def find_service(name: str, namespace: str | None) -> RayService:
    """Join the cluster and return a service that runs there; what a killed driver has left of it is removed."""
    namespace = namespace or NAMESPACE
    join_cluster(start=False)
    remove_leftovers(name, namespace)
    indices = running_services(namespace).get(name)
    if not indices:
        raise EngineError(
            f"no service {name!r} is running. {_describe(namespace)} "
            f"AsyncVLLM.launch(..., backend='ray', name={name!r}) starts one."
        )
    # any replica knows its service, and one may just be restarting
    reason = ""
    for index in indices:
        try:
            service: RayService = _ask(name, namespace, index).service
            return service
        except (RayError, ValueError) as error:
            reason = str(error)
    raise EngineError(f"service {name!r}: none of its replicas {indices} answered within {ASK_SECONDS:g} s: {reason}")


# -- what is left -----------------------------------------------------------------------------------------------------


def remove_leftovers(name: str, namespace: str) -> int:
    """Remove the placement groups of a service that hold none of its actors; return how many there were.

    A driver that is killed while it places or ends a replica leaves such a group, which would hold its devices forever.
    """
    # looked at twice: a driver that is placing a replica has a group and no actor for a moment
    first = _groups_without_actor(name, namespace)
    if not first:
        return 0
    time.sleep(MAKING_SECONDS)
    leftovers = first & _groups_without_actor(name, namespace)
    _remove_groups(leftovers)
    return len(leftovers)


def _groups_of(name: str, namespace: str) -> dict[int, dict[str, str]]:
    """Return the placement groups of a service: replica -> id -> state."""
    found: dict[int, dict[str, str]] = {}
    for row in placement_group_table().values():
        if row["state"] != "REMOVED" and (parsed := parse_group_name(row["name"])) and parsed[:2] == (namespace, name):
            found.setdefault(parsed[2], {})[row["placement_group_id"]] = row["state"]
    return found


def _groups_without_actor(name: str, namespace: str) -> set[str]:
    groups = _groups_of(name, namespace)
    running = running_services(namespace).get(name, []) if groups else []
    without: set[str] = set()
    for index, ids in groups.items():
        if index not in running:
            without |= ids.keys()
        elif len(ids) > 1:
            with contextlib.suppress(RayError, ValueError):  # it cannot be known now which is its own
                without |= ids.keys() - {_ask(name, namespace, index).group.id.hex()}
    return without


def _ask(name: str, namespace: str, index: int) -> Any:
    """Return a replica's description; ``ValueError`` if it has no actor."""
    actor = ray.get_actor(f"{name}-replica-{index}", namespace)
    return ray.get(actor.describe.remote(), timeout=ASK_SECONDS)


def _remove_groups(ids: set[str]) -> None:
    for group in ids:
        with contextlib.suppress(RayError):  # another process has just done so
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))))


def end_service(name: str, namespace: str | None) -> None:
    """Join the cluster, end a service that runs there, for all its drivers, and free what was reserved for it."""
    namespace = namespace or NAMESPACE
    join_cluster(start=False)
    indices = running_services(namespace).get(name, [])
    groups = _groups_of(name, namespace)
    if not indices and not groups:
        raise EngineError(f"no service {name!r} is running. {_describe(namespace)}")
    actors = {}
    for index in indices:
        with contextlib.suppress(ValueError):
            actors[index] = ray.get_actor(f"{name}-replica-{index}", namespace)
    waiting = {index for index, states in groups.items() if PLACED not in states.values()}  # they would not answer
    # those that run end their engines; then all actors are killed, and their places freed
    ending = [actor.shut_down.remote() for index, actor in actors.items() if index not in waiting]
    if ending:
        ray.wait(ending, num_returns=len(ending), timeout=END_SECONDS)
    for actor in actors.values():
        ray.kill(actor)
    _remove_groups(set().union(*groups.values(), *_groups_of(name, namespace).values()))
    # the caller may start a service of that name at once
    deadline = time.monotonic() + GONE_SECONDS
    while name in running_services(namespace) and time.monotonic() < deadline:
        time.sleep(MAKING_SECONDS / 10)
