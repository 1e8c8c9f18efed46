"""Replicas in Ray over the toy engine: Ray's part is real, and a replica starts in a second."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import psutil
import ray

from support.processes import TESTS
from torchrl_moe.modules.backends.ray import actor
from torchrl_moe.modules.backends.ray.actor import ReplicaActor
from torchrl_moe.modules.backends.ray.cluster import RayService
from torchrl_moe.modules.backends.vllm import engine_args


class ToyActor(ReplicaActor):
    """In the place of ``ReplicaActor``: Ray's part is real, the engine process is the toy engine's."""

    def __init__(self, index: int, service: RayService, forwarded: Mapping[str, str], *rest: Any) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        super().__init__(index, dataclasses.replace(service, kind="support.toy_kind"), forwarded, *rest)
        self._service = service  # as its drivers know it

    def pids(self) -> tuple[int, int]:
        """Return the actor's process and the engine's."""
        return os.getpid(), self._child.process.pid


class Holder:
    """Of tests, for an actor: holds an engine, and answers by it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        return self.engine.generate(prompt, use_tqdm=False).outputs[0].token_ids.tolist(), os.getpid()


@contextmanager
def toy_actors() -> Iterator[None]:
    """Actors that are placed meanwhile host the toy engine."""
    # pytest's would be imported by each actor; and the toy engine's arguments are not vLLM's
    with patch.object(actor, "ReplicaActor", ToyActor), patch.object(engine_args, "_known", dict):
        yield


def ray_service(*, name: str, detached: bool = False, cpus: float = 1.0, **start: Any) -> RayService:
    return RayService(
        name=name,
        detached=detached,
        num_replicas=2,
        kind="support.toy_kind",
        arguments={"model": "toy", "start": start},
        resources={"CPU": cpus},
    )


def actor_of(replica: Any) -> Any:
    return replica._child._actor


def pids(replica: Any) -> tuple[int, int]:
    """The processes of the actor and of the toy engine."""
    return tuple(ray.get(actor_of(replica).pids.remote(), timeout=20))


def actor_process(replica: Any) -> psutil.Process:
    """The process of a real actor: the one that listens at its listener."""
    port = ray.get(replica._child._actor.describe.remote(), timeout=20).address.port
    candidates = [process for process in psutil.process_iter() if process.name().startswith("ray::")]
    (actor,) = [p for p in candidates if any(c.laddr.port == port for c in p.net_connections() if c.status == "LISTEN")]
    return actor


def groups_in_use() -> list[str]:
    """The names of the placement groups that hold something."""
    table = ray.util.placement_group_table()
    return sorted(group["name"] for group in table.values() if group["state"] != "REMOVED")
