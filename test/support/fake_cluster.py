"""What a link asks of Ray, answered here: actors by their names, and placement groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from torchrl_moe.modules.backends.ray import ray_replica as actor_link
from torchrl_moe.modules.backends.ray.actor import Description
from torchrl_moe.modules.backends.ray.cluster import RayService
from torchrl_moe.modules.backends.ray.replica_host import Address

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
    """In the place of Ray; no group is ever placed, so an actor that a link makes never answers.

    Attributes:
        actors: name -> actor.
        faster: what another driver puts there as a link is about to: name -> actor.
        killed: actors.
        asked: how many groups were asked for.
        removed: the ids of groups.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, FakeActor] = {}
        self.faster: dict[str, FakeActor] = {}
        self.killed: list[FakeActor] = []
        self.asked = 0
        self.removed: list[str] = []
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
