"""Replicas in Ray over the toy engine: Ray's part is real, and a replica starts in a second."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import psutil
import ray

from support import toy_kind
from support.processes import TESTS, process_of, toy_environment
from torchrl_moe.modules.backends.process.process_replica import LocalReplica
from torchrl_moe.modules.backends.ray import actor
from torchrl_moe.modules.backends.ray import ray_replica as actor_link
from torchrl_moe.modules.backends.ray.actor import Address, Description, ReplicaActor, ReplicaHost
from torchrl_moe.modules.backends.ray.cluster import RayService
from torchrl_moe.modules.backends.ray.ray_replica import RayReplica
from torchrl_moe.modules.backends.vllm import engine_args

if TYPE_CHECKING:
    import pytest


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
    how: dict[str, Any] = {"arguments": {"model": "toy", "start": start}, "resources": {"CPU": cpus}}
    return RayService(name=name, detached=detached, num_replicas=2, kind="support.toy_kind", **how)


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


def kill(replica: Any) -> None:
    """End a replica of any kind as a crash would: a child's process, an actor's, or a fake."""
    if isinstance(replica, LocalReplica):
        process_of(replica).kill()
    elif isinstance(replica, RayReplica):
        actor_process(replica).kill()
    else:
        threading.Thread(target=replica.die).start()  # it tells the service, whose loop may be the caller's


def groups_in_use() -> list[str]:
    """The names of the placement groups that hold something."""
    table = ray.util.placement_group_table()
    return sorted(group["name"] for group in table.values() if group["state"] != "REMOVED")


NOWHERE = Address(host="127.0.0.1", port=9, key=b"")  # nobody listens there
PENDING = object()  # the answer of an actor that has no place yet


class FakeActor:
    """Describes itself and is shut down; its methods return what ``ray.get`` calls."""

    def __init__(self, service: RayService, group: str) -> None:
        self.said: list[str] = []
        self._description = Description(address=NOWHERE, group=SimpleNamespace(id=group), service=service)
        self.describe = SimpleNamespace(remote=lambda: lambda: self._description)
        self.shut_down = SimpleNamespace(remote=lambda: lambda: self.said.append("shut down"))


class FakeCluster:
    """In the place of Ray; no group is ever placed, so an actor that a link makes never answers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, FakeActor] = {}
        self.faster: dict[str, FakeActor] = {}  # what another driver puts there as a link is about to
        self.killed: list[FakeActor] = []
        self.asked, self.removed = 0, list[str]()  # groups: how many, and their ids
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(ray, "get_actor", self._get_actor)
        patch.setattr(ray, "wait", lambda references, timeout: ([r for r in references if r is not PENDING], []))
        patch.setattr(ray, "remote", lambda kind: SimpleNamespace(options=self._options))
        patch.setattr(ray, "get", lambda reference, timeout=None: reference())
        patch.setattr(ray, "kill", self._kill)
        patch.setattr(actor_link, "placement_group", self._ask_for_group)
        patch.setattr(actor_link, "remove_placement_group", lambda group: self.removed.append(group.id))

    def _get_actor(self, name: str, namespace: str) -> FakeActor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def _kill(self, actor: FakeActor) -> None:
        self.killed.append(actor)
        self.actors = {name: other for name, other in self.actors.items() if other is not actor}

    def _options(self, *, name: str, **how: Any) -> Any:
        def make(index: int, service: RayService, forwarded: Any, group: Any, *rest: Any) -> FakeActor:
            self.actors.update(self.faster)
            if name in self.actors:
                raise ValueError(f"the name {name} is taken")
            self.actors[name] = new = FakeActor(service, group.id)
            new.describe = SimpleNamespace(remote=lambda: PENDING)
            return new

        return SimpleNamespace(remote=make)

    def _ask_for_group(self, bundles: Any, **how: Any) -> Any:
        self.asked += 1
        return SimpleNamespace(id=f"asked-{self.asked}", wait=lambda seconds: False)


class ToyHost(ReplicaHost):
    """Notes that its engine died."""

    def __init__(self, awaits_secrets: bool = False, **start: Any) -> None:
        self.died = threading.Event()
        arguments = {"model": "toy", "start": start}
        super().__init__(4, toy_kind, arguments, toy_environment(), "127.0.0.1", awaits_secrets=awaits_secrets)

    def _engine_died(self) -> None:
        self.died.set()
