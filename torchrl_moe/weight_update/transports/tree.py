"""Which replica gets a version from which: the trainer sends to a few, each of these to a few others."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

__all__ = ["FAN_OUT", "Place", "Tree"]

FAN_OUT = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica gets versions from.

    Attributes:
        parent: the replica that sends to it; ``None`` is the trainer.
        number: among its parent's children, from 0 on; free again for another one when it leaves.
    """

    parent: weakref.ref[Any] | None
    number: int

    def sender(self) -> Any:
        """Return the replica that sends, if it is not the trainer and still there."""
        return None if self.parent is None else self.parent()


class Tree:
    """The places of replicas. A replica keeps its place from version to version, as long as its sender has one, too.

    Args:
        fan_out: how many the trainer, and each replica, sends to.
    """

    def __init__(self, fan_out: int = FAN_OUT) -> None:
        if fan_out < 1:
            raise ValueError(f"fan_out must be at least 1, got {fan_out}")
        self._fan_out = fan_out
        self._places: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
        self._takes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # a version's digest
        self._lock = threading.Lock()

    def at_the_top(self, replica: Any) -> bool:
        """Give a replica a place under the trainer, if one is free; return whether it has one."""
        with self._lock:
            place = self._places.get(replica)
            if place is None:
                place = self._find(replica, "")
                if place.parent is not None or place.number >= self._fan_out:
                    return False
                self._places[replica] = place
            return place.parent is None

    def join(self, replica: Any, digest: str) -> Place:
        """Note that a replica takes a version from now on, and return its place.

        A new one is under the trainer, else under a replica that takes the version already, else under any.
        """
        with self._lock:
            self._takes[replica] = digest
            place = self._places.get(replica)
            if place is None or not (place.parent is None or place.sender() in self._places):
                self._places.pop(replica, None)
                self._places[replica] = place = self._find(replica, digest)
            return place

    def takes(self, replica: Any, digest: str) -> bool | None:
        """Whether a replica has a version, or is receiving it; ``None`` if it was not asked to yet."""
        with self._lock:
            if replica not in self._places:
                return False
            return True if self._takes.get(replica) == digest else None

    def leave(self, replica: Any) -> None:
        """Note that a replica has no version, and no place: those under it find another one."""
        with self._lock:
            self._takes.pop(replica, None)
            self._places.pop(replica, None)

    def _find(self, replica: Any, digest: str) -> Place:
        taken: dict[int | None, set[int]] = {}  # sender, None for the trainer -> numbers
        for place in self._places.values():
            sender = place.sender()
            if sender is not None or place.parent is None:
                taken.setdefault(None if sender is None else id(sender), set()).add(place.number)
        if (free := self._free(taken.get(None))) is not None:
            return Place(None, free)
        sends, later = id(replica) in taken, None
        for other in list(self._places):
            free = self._free(taken.get(id(other)))
            if free is None or (sends and self._is_under(other, replica)):
                continue
            if self._takes.get(other) == digest:
                return Place(weakref.ref(other), free)
            later = later or Place(weakref.ref(other), free)
        return later or Place(None, len(self._places))  # all others are under it

    def _free(self, taken: set[int] | None) -> int | None:
        """Return the least free number, if a sender has room."""
        return next((number for number in range(self._fan_out) if number not in (taken or ())), None)

    def _is_under(self, replica: Any, other: Any) -> bool:
        while replica is not None and replica is not other:
            place = self._places.get(replica)
            replica = None if place is None else place.sender()
        return replica is not None
