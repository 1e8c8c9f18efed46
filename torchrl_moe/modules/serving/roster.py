"""The replicas of a service and what is known of each: state, weight version, requests in flight. One lock for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchrl_moe.modules.serving.states import ReplicaState, check_transition

__all__ = ["Roster", "RosterEntry"]


@dataclass(slots=True)
class RosterEntry:
    """One line of the roster. Load is what the service handed out and did not get back, never a polled figure."""

    index: int
    replica: Any
    state: ReplicaState = ReplicaState.STARTING
    version: int = 0
    inflight: int = 0
    chosen: int = field(default=-1)  # when it was last chosen, on the roster's own clock

    def __repr__(self) -> str:
        return f"#{self.index} {self.state.name} v{self.version} inflight={self.inflight}"


class Roster:
    """The replicas of one service.

    Args:
        replicas: anything; the roster only keeps them.
        state: the state that all begin in.
    """

    def __init__(self, replicas: Sequence[Any], state: ReplicaState = ReplicaState.STARTING) -> None:
        self.changed = threading.Condition()
        self._entries = [RosterEntry(index, replica, state) for index, replica in enumerate(replicas)]
        self._clock = 0
        self._open_ids: set[str] = set()
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RosterEntry]:
        return iter(self._entries)

    def __getitem__(self, index: int) -> RosterEntry:
        if not 0 <= index < len(self._entries):
            raise IndexError(f"actor index {index} out of range [0, {len(self._entries)})")
        return self._entries[index]

    # -- states -----------------------------------------------------------------------------------------------------

    def set_state(self, index: int, state: ReplicaState) -> None:
        """Move a replica to another state; see :func:`check_transition` for what is refused."""
        with self.changed:
            entry = self[index]
            check_transition(entry.state, state)
            entry.state = state
            self.changed.notify_all()
            for listener in self._listeners:
                listener()

    def set_version(self, index: int, version: int) -> None:
        """Note which weights a replica holds."""
        with self.changed:
            self[index].version = version
            self.changed.notify_all()

    def mark_dead(self, index: int) -> None:
        """Note that a replica's process is gone; more than one caller may find that out."""
        with self.changed:
            if self[index].state is not ReplicaState.DEAD:
                self.set_state(index, ReplicaState.DEAD)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call ``listener`` at every change of state, from the thread that makes it; it must return at once."""
        with self.changed:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self.changed:
                self._listeners.remove(listener)

    # -- requests ---------------------------------------------------------------------------------------------------

    def reserve(self, index: int) -> None:
        """Count one more request in flight. The caller holds ``changed``, having chosen under it."""
        entry = self[index]
        entry.inflight += 1
        entry.chosen = self._clock
        self._clock += 1

    def give_back(self, index: int) -> None:
        """Count one request less in flight."""
        with self.changed:
            self[index].inflight -= 1
            self.changed.notify_all()

    def open_ids(self, ids: Iterable[str]) -> None:
        """Note that requests of these names are about to be in flight.

        Raises:
            ValueError: one of them is already; a replica could not tell the two apart.
        """
        with self.changed:
            wanted = set(ids)
            if taken := sorted(wanted & self._open_ids):
                raise ValueError(f"request ids are in flight already: {', '.join(taken)}. Use an id once at a time.")
            self._open_ids |= wanted

    def close_ids(self, ids: Iterable[str]) -> None:
        """Note that requests are over; closing twice does nothing."""
        with self.changed:
            self._open_ids.difference_update(ids)

    def __repr__(self) -> str:
        return f"Roster({', '.join(map(repr, self._entries))})"
