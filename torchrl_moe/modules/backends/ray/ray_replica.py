"""A replica in a Ray cluster, as its driver sees it: the same engine process, behind an actor."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from torchrl_moe.modules.backends.process import packing, wire
from torchrl_moe.modules.backends.process.replica import EngineReplica
from torchrl_moe.modules.backends.ray.actor_link import ActorLink
from torchrl_moe.modules.backends.ray.ray_service import RayService
from torchrl_moe.modules.backends.ray.replica_host import driver_of, named_after, wrap
from torchrl_moe.modules.backends.replica import Completion

__all__ = ["RayReplica"]


class RayReplica(EngineReplica[ActorLink]):
    """A replica whose engine process is the child of an actor; :meth:`start` joins the actor if it runs already.

    Args:
        index: place in the service.
        service: the one that it belongs to.
        number: added to the service's seed if this driver places the actor; default: the index.
    """

    def __init__(self, index: int, service: RayService, number: int | None = None) -> None:
        super().__init__(index)
        self._service = service
        self._places = True
        self._number = index if number is None else number

    def join(self) -> None:
        """:meth:`start`, but place no actor: if there is none, :meth:`wait_ready` raises."""
        self._places = False
        self.start()

    def _open(self) -> ActorLink:
        link = ActorLink(self.index, self._service, self._number, self._places)
        self.driver = link.driver
        self._name_calls(link.driver)
        return link

    def _name_calls(self, driver: str) -> None:
        self._numbers = zip(itertools.repeat(driver), itertools.count(), strict=False)

    def shutdown(self) -> None:
        """End the engine and its actor, for all drivers, and free what the cluster had reserved. Idempotent."""
        if self._child is None:
            return
        self._fail_all(f"replica {self.index} was shut down")
        self._child.destroy()
        self._end()

    def disconnect(self) -> None:
        """Disconnect from a replica that outlives its drivers; this driver's requests are aborted. Idempotent."""
        if self._child is None:
            return
        self._fail_all(f"replica {self.index}: this driver has left")
        self._end()

    def snapshot(self, timeout: float) -> list[Completion]:
        """Return what each request of this driver has so far; see the protocol."""
        own = [(*driver_of(one.request_id), one) for one in super().snapshot(timeout)]
        return [replace(one, request_id=name) for driver, name, one in own if driver == self._started().driver]

    # -- plumbing ---------------------------------------------------------------------------------------------------

    def _encode(self, *message: Any) -> wire.Frames:
        """Wrap a message: request ids get this driver's name, and the actor learns them without unpacking it."""
        driver = self._started().driver
        opened: list[str] = []
        kind, *rest = message
        if kind == "generate":
            rest = [packing.rename(rest[0], lambda request_id: named_after(driver, request_id))]
            opened = packing.packed_ids(rest[0])
        elif kind == "abort":
            rest = [[named_after(driver, request_id) for request_id in rest[0]]]
        return wrap((kind, *rest), opened)

    def _handle(self, kind: str, *rest: Any) -> None:
        if kind in ("tail", "died") and self._started().was_left:
            return  # a consequence of that; the connection ends, too, and then the link says why
        if kind == "tail":
            self._started().words = rest[0]
        elif kind == "ended":
            self.was_ended = True
        elif kind == "completions":
            super()._handle(kind, packing.rename(rest[0], self._own_id))
        elif kind == "refused":
            super()._handle(kind, self._own_id(rest[0]), *rest[1:])
        else:
            super()._handle(kind, *rest)

    def _own_id(self, request_id: str) -> str:
        """Return an id as its sender knows it; those of other drivers, in a message for both, stay as they are."""
        driver, own = driver_of(request_id)
        return own if driver == self._started().driver else request_id

    def _ending(self) -> str:
        return f"was lost: {self._tail()}"
