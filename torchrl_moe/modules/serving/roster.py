"""The replicas of a service and what is known of each: state, weight version, requests in flight. One lock for all."""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchrl_moe.modules.serving.candidates import CacheUsage, Candidates, RosterEntry
from torchrl_moe.modules.serving.states import ReplicaState, check_transition

__all__ = ["Roster", "RosterEntry"]


class Roster:
    """The replicas of one service.

    Args:
        replicas: anything; the roster only keeps them.
        state: the state that all begin in.
    """

    def __init__(self, replicas: Sequence[Any], state: ReplicaState = ReplicaState.STARTING) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._entries = [RosterEntry(index, replica, state) for index, replica in enumerate(replicas)]
        self._choices = itertools.count()
        self._caches = itertools.count()
        for entry in self._entries:
            entry.cache = next(self._caches)
        self._open_ids: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._versions: list[int] | None = None  # those that serve, in order; None: to be found anew
        self._views: dict[tuple[int, int] | None, Candidates] = {}
        self.reports: deque[tuple[float, int]] = deque()  # when, which replica; of reports of load

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
        with self.lock:
            entry = self[index]
            check_transition(entry.state, state)
            entry.state = state
            if state in (ReplicaState.STARTING, ReplicaState.DEAD):
                self._lose_cache(entry)
                entry.polled, entry.usage = 0, None
            self._forget_views()
            self.changed.notify_all()
            for listener in self._listeners:
                listener()

    def set_version(self, index: int, version: int) -> None:
        """Note which weights a replica holds; what it has cached was made by others."""
        with self.lock:
            entry = self[index]
            entry.version = version
            self._lose_cache(entry)
            self.changed.notify_all()

    def forget_prefixes(self, index: int) -> None:
        """Note that a replica has lost its cached prefixes."""
        with self.lock:
            self._lose_cache(self[index])

    def _lose_cache(self, entry: RosterEntry) -> None:
        entry.cache = next(self._caches)
        self._forget_views()

    def mark_dead(self, index: int) -> None:
        """Note that a replica's process is gone; more than one caller may find that out."""
        with self.lock:
            if self[index].state is not ReplicaState.DEAD:
                self.set_state(index, ReplicaState.DEAD)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call ``listener`` at every change of state, from the thread that makes it; it must return at once."""
        with self.lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self.lock:
                self._listeners.remove(listener)

    # -- who may serve ----------------------------------------------------------------------------------------------

    def serving(self, oldest: int | None = None, newest: int | None = None) -> Candidates:
        """Return the replicas that serve and hold a version from ``oldest`` to ``newest``, perhaps none.

        The caller holds the lock for as long as it uses them.
        """
        versions = self._versions
        if versions is None:
            states = ((entry.version, entry.state) for entry in self._entries)
            self._versions = versions = sorted({v for v, state in states if state is ReplicaState.SERVING})
        first = 0 if oldest is None else bisect_left(versions, oldest)
        last = len(versions) if newest is None else bisect_right(versions, newest)
        key = (versions[first], versions[last - 1]) if first < last else None
        view = self._views.get(key)
        if view is None:
            self._views[key] = view = Candidates(
                entry
                for entry in self._entries
                if entry.state is ReplicaState.SERVING and key is not None and key[0] <= entry.version <= key[1]
            )
        return view

    @property
    def newest_version(self) -> int:
        """The newest version that serves. The caller holds the lock and has asked :meth:`serving`."""
        if not self._versions:
            raise ValueError(f"no replica is serving: {self!r}")
        return self._versions[-1]

    def _forget_views(self) -> None:
        self._versions = None
        self._views.clear()

    # -- load -------------------------------------------------------------------------------------------------------

    def reserve(self, index: int) -> None:
        """Count one more request in flight. The caller holds the lock, having chosen under it."""
        entry = self._entries[index]
        before = entry.load
        entry.inflight += 1
        entry.chosen = next(self._choices)
        self._tell(entry, before)

    def touch(self, index: int) -> None:
        """Note that a replica was chosen, without counting a request. The caller holds the lock."""
        entry = self._entries[index]
        entry.chosen = next(self._choices)
        self._tell(entry, entry.load)

    def give_back(self, index: int) -> None:
        """Count one request less in flight."""
        with self.lock:
            entry = self._entries[index]
            before = entry.load
            entry.inflight -= 1
            self._tell(entry, before)
            self.changed.notify_all()

    def _tell(self, entry: RosterEntry, before: int) -> None:
        change = entry.load - before
        for view in self._views.values():
            view.moved(entry, change)

    def observe(self, index: int, at: float, pending: int | None = None, cache_usage: float | None = None) -> None:
        """Note what a replica says of itself: requests it has, share of KV blocks in use (0 to 1).

        Args:
            index: the replica.
            at: when, on the clock of those who read it; never earlier than the time before.
            pending: counts as load where it is more than was counted here, until :meth:`expire` drops it.
            cache_usage: kept with its time.
        """
        with self.lock:
            entry = self[index]
            if pending is not None:
                before = entry.load
                entry.polled, entry.polled_at = pending, at
                self.reports.append((at, index))
                self._tell(entry, before)
            if cache_usage is not None:
                entry.usage = CacheUsage(cache_usage, at, entry.inflight)

    def read_figures(self) -> None:
        """Take what replicas have sent of themselves since the last time. The caller holds the lock."""
        for entry in self._entries:
            figures = getattr(entry.replica, "last_stats", None)
            if figures is not None and figures is not entry.figures:
                entry.figures = figures
                entry.usage = CacheUsage(min(max(figures.cache_usage, 0.0), 1.0), math.inf, entry.inflight)

    def expire(self, before: float) -> None:
        """Drop reports of load that are older than that. The caller holds the lock."""
        while self.reports and self.reports[0][0] < before:
            _, index = self.reports.popleft()
            entry = self._entries[index]
            if entry.polled_at < before:  # else a later report holds
                load = entry.load
                entry.polled = 0
                self._tell(entry, load)

    # -- requests ---------------------------------------------------------------------------------------------------

    def open_ids(self, ids: Iterable[str]) -> None:
        """Note that requests of these names are about to be in flight.

        Raises:
            ValueError: one of them is already; a replica could not tell the two apart.
        """
        with self.lock:
            wanted = set(ids)
            if taken := sorted(wanted & self._open_ids):
                raise ValueError(f"request ids are in flight already: {', '.join(taken)}. Use an id once at a time.")
            self._open_ids |= wanted

    def close_ids(self, ids: Iterable[str]) -> None:
        """Note that requests are over; closing twice does nothing."""
        with self.lock:
            self._open_ids.difference_update(ids)

    def __repr__(self) -> str:
        return f"Roster({', '.join(map(repr, self._entries))})"
