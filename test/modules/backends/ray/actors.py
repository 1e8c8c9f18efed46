"""What the tests of replicas in Ray share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import ray

from modules.backends.ray.toy_actor import ToyActor
from torchrl_moe.modules.backends.ray import actor
from torchrl_moe.modules.backends.ray.ray_service import RayService


@contextmanager
def toy_actors() -> Iterator[None]:
    """Actors that are placed meanwhile host the toy engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor, "ReplicaActor", ToyActor)
        yield


def ray_service(*, name: str, detached: bool = False, cpus: float = 1.0, **start: Any) -> RayService:
    return RayService(
        name=name,
        detached=detached,
        num_replicas=2,
        arguments={"model": "toy", "start": start},
        resources={"CPU": cpus},
    )


def actor_of(replica: Any) -> Any:
    return replica._child._actor


def pids(replica: Any) -> tuple[int, int]:
    """The processes of the actor and of the toy engine."""
    return tuple(ray.get(actor_of(replica).pids.remote(), timeout=20))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; that its parent did not ask how is not ours."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def groups_in_use() -> list[str]:
    """The names of the placement groups that hold something."""
    table = ray.util.placement_group_table()
    return sorted(group["name"] for group in table.values() if group["state"] != "REMOVED")
