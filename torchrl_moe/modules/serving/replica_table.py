"""The replicas of a service and what is known of each: state, weight version, requests in flight. One lock for all."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torchrl_moe.modules.serving.candidates import (
    Breaker,
    BreakerState,
    CacheUsage,
    Candidates,
    FaultPolicy,
    Groups,
    Recovery,
    ReplicaState,
    TableEntry,
    check_transition,
)

if TYPE_CHECKING:
    from torchrl_moe.modules.backends.replica import Replica

LOG = logging.getLogger(__name__)

SHOWN = 8
"""How many replicas a repr lists one by one."""


class ReplicaTable:
    """The replicas of one service."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        state: ReplicaState = ReplicaState.STARTING,
        faults: FaultPolicy | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.changes = 0  # number of changes so far that may affect placement
        self.latest_version = 0  # the newest version that any replica has held
        self._faults = faults or FaultPolicy()
        self._choices = itertools.count()
        self._caches = itertools.count()
        self._entries: list[TableEntry] = []  # by index; removed ones included
        self._listed: list[TableEntry] = []
        self._append(replicas, state)
        self.groups = Groups()  # here, so that another balancer keeps their versions
        self._listeners: dict[Callable[[], None], bool] = {}  # in order -> whether doubts are reported to them too
        self.doubts: set[int] = set()
        self._versions: list[int] | None = None  # serving versions, in order; None: to be recomputed
        self._views: dict[tuple[int, int] | None, Candidates] = {}
        self.reports: deque[tuple[float, int]] = deque()  # when, which replica; of reports of load

    def _append(self, replicas: Sequence[Replica], state: ReplicaState) -> list[TableEntry]:
        new = [
            TableEntry(index, replica, state, cache=next(self._caches), breaker=Breaker(self._faults))
            for index, replica in enumerate(replicas, len(self._entries))
        ]
        self._entries += new
        self._listed = [*self._listed, *new]
        return new

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> Iterator[TableEntry]:
        return iter(self._listed)

    def __getitem__(self, index: int) -> TableEntry:
        if not 0 <= index < len(self._entries):
            raise IndexError(f"actor index {index} out of range [0, {len(self._entries)})")
        return self._entries[index]

    # -- more and fewer ---------------------------------------------------------------------------------------------

    @property
    def next_index(self) -> int:
        """The index of the next added replica; no index is used twice."""
        return len(self._entries)

    def add(self, replicas: Sequence[Replica]) -> list[TableEntry]:
        """List more replicas, which are STARTING."""
        with self.lock:
            new = self._append(replicas, ReplicaState.STARTING)
            for entry in new:
                entry.joining = True
            return new

    def set_leaving(self, index: int, leaving: bool) -> None:
        with self.lock:
            self[index].leaving = leaving
            self._tell([self[index]])

    def set_reserved(self, index: int, reserved: bool) -> None:
        """Reserve a replica for one request, or undo that; the table tells when it is idle."""
        with self.lock:
            self[index].reserved = reserved
            self._tell([self[index]])

    def remove(self, index: int) -> None:
        """Remove a replica from the list. Its entry stays valid for whatever refers to it, and is DEAD for good."""
        with self.lock:
            entry = self[index]
            entry.removed, entry.leaving, entry.recovery = True, True, Recovery.NOBODY
            self._listed = [one for one in self._listed if one is not entry]
            entry.last_error = "it was removed"
            if entry.state is ReplicaState.DEAD:
                self._tell([entry])
            else:
                self.set_state(index, ReplicaState.DEAD)

    # -- states -----------------------------------------------------------------------------------------------------

    def set_state(self, index: int, state: ReplicaState) -> None:
        """Move a replica to another state; see :func:`check_transition` for what is refused."""
        with self.lock:
            entry = self[index]
            check_transition(entry.state, state)
            if state is ReplicaState.QUARANTINED:
                LOG.warning("replica %d is quarantined: an update left it with unknown weights", index)
            elif state is ReplicaState.SERVING and entry.state is ReplicaState.STARTING and entry.restarts:
                LOG.warning("replica %d serves again, after restart %d", index, entry.restarts)
            entry.state = state
            entry.joining &= state is not ReplicaState.SERVING
            if entry.recovery is Recovery.UPDATE and state is not ReplicaState.STARTING:
                entry.recovery = Recovery.SUPERVISOR
            if state in (ReplicaState.STARTING, ReplicaState.DEAD):
                self._lose_cache(entry)
                entry.polled, entry.usage = 0, None
            self._tell([entry])

    def _tell(self, changed: Iterable[TableEntry]) -> None:
        """Notify listeners that these entries changed, so that placement may have other results."""
        self.changes += 1
        for entry in (*changed, *self._half_open_all()):
            entry.change = self.changes
        self._forget_views()
        self.changed.notify_all()
        for listener in self._listeners:
            listener()

    def changed_since(self, change: int) -> list[TableEntry]:
        """Return those that changed after a number of :attr:`changes`. The caller holds the lock."""
        return [entry for entry in self._entries if entry.change > change]

    def set_version(self, index: int, version: int) -> None:
        """Set a replica's weight version; its cached prefixes belong to other weights."""
        with self.lock:
            entry = self[index]
            entry.version = version
            self._lose_cache(entry)
            if version > self.latest_version:
                self.note_version(version)
            else:
                self._tell([entry])

    def note_version(self, version: int) -> None:
        """Note that some replica holds a version, perhaps loaded by another driver."""
        with self.lock:
            if version > self.latest_version:
                self.latest_version = version
                self._tell(self._entries)  # a restarting replica will have another version than assumed

    def forget_prefixes(self, index: int) -> None:
        """Note that a replica has lost its cached prefixes."""
        with self.lock:
            self._lose_cache(self[index])

    def _lose_cache(self, entry: TableEntry) -> None:
        entry.cache = next(self._caches)
        self._forget_views()

    def mark_dead(self, index: int, error: str | None = None, replica: Replica | None = None) -> None:
        """Mark a replica as dead; several callers may detect the same death."""
        with self.lock:
            entry = self[index]
            if replica is not None and entry.replica is not replica:
                return
            if entry.state is not ReplicaState.DEAD:
                entry.last_error = error or entry.last_error
                entry.breaker.failed()
                self.set_state(index, ReplicaState.DEAD)
                if error and not entry.leaving:  # it was not asked to end
                    said = error.partition("\n")[0]
                    LOG.warning("%s", said if f"replica {index}" in said else f"replica {index} is dead: {said}")

    def note_not_finite(self, index: int, count: int) -> None:
        """Count log-probs of an answer that are NaN or infinite; the first of each version is logged."""
        with self.lock:
            entry = self[index]
            entry.not_finite += count
            if entry.bad_version != entry.version:
                entry.bad_version = entry.version
                LOG.warning(
                    "replica %d answered with %d log-probs that are NaN or infinite, by version %d of its weights or "
                    "by an adapter; they are counted as not_finite_logprobs in stats()",
                    index,
                    count,
                    entry.version,
                )

    def replace(self, index: int, replica: Replica) -> bool:
        """Replace a replica that died or is quarantined by a new one, with the checkpoint's weights."""
        with self.lock:
            entry = self[index]
            if entry.leaving:
                return False
            entry.replica, entry.version, entry.lacks = replica, 0, None
            entry.restarts += 1
            entry.breaker.try_now()  # what its predecessor did says little about it: a few requests try it
            self.set_state(index, ReplicaState.STARTING)
            return True

    def set_recovery(self, index: int, recovery: Recovery) -> None:
        """Set what will bring a replica back, and notify the calls that wait for it."""
        with self.lock:
            self[index].recovery = recovery
            self._tell([self[index]])

    # -- breakers ---------------------------------------------------------------------------------------------------

    def fail(self, index: int, error: str, trip: bool = False) -> None:
        """Count a failure of a replica; ``trip`` opens its breaker at once."""
        with self.lock:
            entry = self[index]
            entry.last_error = error
            entry.breaker.failed(trip)
            self._tell([entry])

    def doubt(self, index: int) -> None:
        """Note that a replica was late, so that it is probed."""
        with self.lock:
            self.doubts.add(index)
            for listener, wants_doubts in self._listeners.items():
                if wants_doubts:
                    listener()

    def take_doubt(self, index: int) -> bool:
        """Whether a replica was late since the last call."""
        with self.lock:
            is_doubted = index in self.doubts
            self.doubts.discard(index)
            return is_doubted

    def cool(self) -> None:
        """Half-open the breakers whose cooldown has passed."""
        with self.lock:
            opened = [entry for entry in self._listed if entry.breaker.state is BreakerState.OPEN]
            for entry in opened:
                entry.breaker.cool()
            if cooled := [entry for entry in opened if entry.breaker.state is not BreakerState.OPEN]:
                self._tell(cooled)

    def _half_open_all(self) -> list[TableEntry]:
        """Half-open all open breakers if no other replica serves: a bad replica is better than none."""
        serving = [entry for entry in self._listed if entry.state is ReplicaState.SERVING]
        if not all(entry.breaker.state is BreakerState.OPEN for entry in serving):
            return []
        for entry in serving:
            entry.breaker.try_now()
        return serving

    # -- listeners --------------------------------------------------------------------------------------------------

    def add_listener(self, listener: Callable[[], None], doubts: bool = False) -> None:
        """Call ``listener`` at every change of state, from the thread that makes it; it must return at once."""
        with self.lock:
            self._listeners[listener] = doubts

    def remove_listener(self, listener: Callable[[], None]) -> None:
        with self.lock:
            self._listeners.pop(listener, None)

    # -- who may serve ----------------------------------------------------------------------------------------------

    def serving(self, oldest: int | None = None, newest: int | None = None) -> Candidates:
        """Return the serving replicas with a version from ``oldest`` to ``newest``, possibly none.

        The caller holds the lock for as long as it uses them.
        """
        versions = self._versions
        if versions is None:
            self._versions = versions = sorted({entry.version for entry in self._listed if entry.may_take})
        first = 0 if oldest is None else bisect_left(versions, oldest)
        last = len(versions) if newest is None else bisect_right(versions, newest)
        key = (versions[first], versions[last - 1]) if first < last else None
        view = self._views.get(key)
        if view is None:
            self._views[key] = view = Candidates(
                entry
                for entry in self._listed
                if entry.may_take and key is not None and key[0] <= entry.version <= key[1]
            )
        return view

    @property
    def newest_version(self) -> int:
        """The newest serving version. The caller holds the lock and has called :meth:`serving`."""
        if not self._versions:
            raise ValueError(f"no replica is serving: {self!r}")
        return self._versions[-1]

    def _forget_views(self) -> None:
        self._versions = None
        self._views.clear()

    # -- load -------------------------------------------------------------------------------------------------------

    def reserve(self, index: int) -> bool:
        """Count one more request in flight; return whether it is a trial. The caller holds the lock since choosing."""
        entry = self._entries[index]
        before = entry.load
        entry.inflight += 1
        entry.chosen = next(self._choices)
        self._count(entry, before)
        trial = entry.breaker.take()
        if trial and entry.breaker.blocks:
            self._forget_views()
        return trial

    def touch(self, index: int) -> None:
        """Note that a replica was chosen, without counting a request. The caller holds the lock."""
        entry = self._entries[index]
        entry.chosen = next(self._choices)
        self._count(entry, entry.load)

    def give_back(self, index: int, trial: bool = False, success: bool | None = None) -> None:
        """Count one request less in flight; a trial also reports its outcome."""
        with self.lock:
            entry = self._entries[index]
            before = entry.load
            entry.inflight -= 1
            self._count(entry, before)
            self.changed.notify_all()
            if trial:
                entry.breaker.tried(success)
            if trial or (entry.reserved and not entry.inflight):
                self._tell([entry])

    def _count(self, entry: TableEntry, before: int) -> None:
        change = entry.load - before
        for view in self._views.values():
            view.moved(entry, change)

    def observe(self, index: int, at: float, pending: int | None = None, cache_usage: float | None = None) -> None:
        """Store a replica's report: its number of requests, share of KV blocks in use (0 to 1)."""
        with self.lock:
            entry = self[index]
            if pending is not None:
                before = entry.load
                entry.polled, entry.polled_at = pending, at
                self.reports.append((at, index))
                self._count(entry, before)
            if cache_usage is not None:
                entry.usage = CacheUsage(cache_usage, at, entry.inflight)

    def read_stats(self) -> None:
        """Read the stats that replicas have sent since the last call. The caller holds the lock."""
        for entry in self._listed:
            stats = getattr(entry.replica, "last_stats", None)
            if stats is not None and stats is not entry.stats:
                entry.stats = stats
                entry.usage = CacheUsage(min(max(stats.cache_usage, 0.0), 1.0), math.inf, entry.inflight)

    def expire(self, before: float) -> None:
        """Drop reports of load from before a time. The caller holds the lock."""
        while self.reports and self.reports[0][0] < before:
            _, index = self.reports.popleft()
            entry = self._entries[index]
            if entry.polled_at < before:  # else a later report holds
                load = entry.load
                entry.polled = 0
                self._count(entry, load)

    def __repr__(self) -> str:
        """List a few replicas; of many, give the number per state and the first ones, for error messages."""
        shown = ", ".join(map(repr, self._listed[:SHOWN]))
        if len(self) <= SHOWN:
            return f"ReplicaTable({shown})"
        states = Counter(entry.state.name for entry in self._listed)
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return f"ReplicaTable({counts}: {shown} and {len(self) - SHOWN} more)"
