"""The replicas of a service and what is known of each: state, weight version, requests in flight. One lock for all.

From the top: how faults are handled, the states of a replica, breakers, groups, one entry, the replicas that may take a
request, and the table. A fleet may have a thousand replicas, and every request asks for the least loaded of them. So
their order is kept in a heap that follows each change; obsolete heap entries are dropped when they reach the top.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from torchrl_moe._checks import check_bool, check_number

if TYPE_CHECKING:
    from torchrl_moe.modules.backends.replica import Replica, ReplicaStats

LOG = logging.getLogger(__name__)


# How a service handles faults: when it restarts, probes or avoids a replica, and how often a request is tried.


SECONDS = (
    "restart_window", "first_delay", "longest_delay", "start", "patience", "slow_patience", "breaker_window",
    "breaker_cooldown",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """Settings of fault handling; all times are in seconds.

    Attributes:
        restart: whether replicas that died are started again.
        max_restarts: of one replica within ``restart_window``; after that it stays dead.
        restart_window: see ``max_restarts``.
        first_delay: before the first restart; it doubles with each restart in the window.
        longest_delay: upper bound of the delay.
        start: time that a restarted engine gets to start.
        attempts: deaths of replicas after which a request fails, if it was alone at the last one. Those that may have
            killed a replica are tried again alone, on a replica that runs nothing else meanwhile; 1: nothing is tried
            again.
        probe: time between health probes, and the time to answer one; ``inf`` for no probes.
        patience: time without an answer after which a replica counts as stalled and is ended.
        slow_patience: the same while the engine's processes compute, since a long step blocks the answers.
        breaker_failures: failures within ``breaker_window`` that keep new requests from a replica.
        breaker_window: see ``breaker_failures``.
        breaker_cooldown: time until it is tried again.
        breaker_trials: trial requests at a time.

    Raises:
        ValueError: a value of another type, or a number out of range.
    """

    restart: bool = True
    max_restarts: int = 10
    restart_window: float = 300.0
    first_delay: float = 0.5
    longest_delay: float = 15.0
    start: float = 600.0
    attempts: int = 2
    probe: float = 10.0
    patience: float = 30.0
    slow_patience: float = 300.0
    breaker_failures: int = 5
    breaker_window: float = 60.0
    breaker_cooldown: float = 10.0
    breaker_trials: int = 3

    def __post_init__(self) -> None:
        check_bool("restart", self.restart)
        for name in ("attempts", "breaker_failures", "breaker_trials"):
            check_number(name, getattr(self, name), 1, whole=True)
        check_number("max_restarts", self.max_restarts, 0, whole=True)
        check_number("probe", self.probe, above=0, infinite=True)
        for name in SECONDS:
            check_number(name, getattr(self, name), 0, infinite=True)

    def delay(self, recent: int) -> float:
        """Return how long to wait before a restart, after so many recent ones.

        >>> [FaultPolicy(first_delay=0.5, longest_delay=3).delay(n) for n in range(5)]
        [0.5, 1.0, 2.0, 3, 3]
        """
        return min(self.first_delay * 2.0 ** min(recent, 60), self.longest_delay)


# The states of a replica, and the allowed transitions.


class ReplicaState(Enum):
    """What a replica may be used for. Only SERVING takes new requests."""

    STARTING = "starting"  # its engine, or the weights it must hold, are still loading
    SERVING = "serving"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    SYNCING = "syncing"  # its weights are being replaced
    QUARANTINED = "quarantined"  # its weights are unknown: waits for a restart
    DEAD = "dead"  # its process is gone

    def __repr__(self) -> str:
        return self.name


GONE = frozenset({ReplicaState.DEAD, ReplicaState.QUARANTINED})
"""States that only a restart ends."""

_S = ReplicaState

# A replica whose update failed half-way is never put back to SERVING: it restarts, and starts again.
TRANSITIONS: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    _S.STARTING: frozenset({_S.SERVING, _S.QUARANTINED, _S.DEAD}),
    _S.SERVING: frozenset({_S.DRAINING, _S.SYNCING, _S.QUARANTINED, _S.DEAD}),
    _S.DRAINING: frozenset({_S.SERVING, _S.SYNCING, _S.QUARANTINED, _S.DEAD}),
    _S.SYNCING: frozenset({_S.SERVING, _S.QUARANTINED, _S.DEAD}),
    _S.QUARANTINED: frozenset({_S.STARTING, _S.DEAD}),
    _S.DEAD: frozenset({_S.STARTING}),
}


def check_transition(old: ReplicaState, new: ReplicaState) -> None:
    """Raise ``ValueError`` unless ``new`` may follow ``old``.

    >>> check_transition(ReplicaState.SERVING, ReplicaState.SYNCING)
    >>> check_transition(ReplicaState.QUARANTINED, ReplicaState.SERVING)
    Traceback (most recent call last):
    ...
    ValueError: a replica that is QUARANTINED cannot become SERVING; allowed: DEAD, STARTING
    """
    allowed = TRANSITIONS[old]
    if new not in allowed:
        names = ", ".join(sorted(state.name for state in allowed))
        raise ValueError(f"a replica that is {old.name} cannot become {new.name}; allowed: {names}")


# A circuit breaker: a replica that keeps failing gets no new requests for a while, then a few to try it.


class BreakerState(Enum):
    """Closed is the normal state, as in electrics."""

    CLOSED = "closed"  # takes requests
    OPEN = "open"  # takes none, until it has cooled down
    HALF_OPEN = "half-open"  # takes a few trial requests: the first success closes it, a failure opens it again


class Breaker:
    """The breaker of one replica. Pure bookkeeping; the caller ensures that one thread at a time uses it.

    >>> breaker = Breaker(FaultPolicy(breaker_failures=2))
    >>> breaker.failed(), breaker.state, breaker.failed(), breaker.state
    (None, <BreakerState.CLOSED: 'closed'>, None, <BreakerState.OPEN: 'open'>)
    """

    __slots__ = ("_clock", "_failures", "_opened", "_policy", "_trials", "state")

    def __init__(self, policy: FaultPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = BreakerState.CLOSED
        self._policy = policy
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=policy.breaker_failures)
        self._opened = 0.0
        self._trials = 0

    @property
    def blocks(self) -> bool:
        if self.state is BreakerState.HALF_OPEN:
            return self._trials >= self._policy.breaker_trials
        return self.state is BreakerState.OPEN

    def take(self) -> bool:
        """Let a request pass; return whether it is a trial, whose outcome goes to :meth:`tried`."""
        trial = self.state is BreakerState.HALF_OPEN
        self._trials += trial
        return trial

    def tried(self, success: bool | None) -> None:
        """Note the outcome of a trial: ``None`` if it says nothing about the replica."""
        self._trials -= 1
        if success and self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.CLOSED
            self._failures.clear()

    def failed(self, trip: bool = False) -> None:
        """Note a failure; ``trip`` opens the breaker whatever was before."""
        now = self._clock()
        self._failures.append(now)
        many = len(self._failures) == self._policy.breaker_failures
        recent = many and now - self._failures[0] <= self._policy.breaker_window
        if trip or self.state is BreakerState.HALF_OPEN or (self.state is BreakerState.CLOSED and recent):
            self.state = BreakerState.OPEN
            self._opened = now

    def cool(self) -> None:
        """Half-open it once it has been open for long enough."""
        if self._clock() - self._opened >= self._policy.breaker_cooldown:
            self.try_now()

    def try_now(self) -> None:
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN


# Groups of requests that all go to one weight version.


MOST_GROUPS = 1 << 17
"""Groups kept without a running request; the one that ended longest ago is dropped first."""


@dataclass(slots=True)
class _Group:
    version: int
    open: int = 0  # running requests
    answered: bool = False  # whether a caller has an answer of that version
    awaited: bool = False  # whether a request waits for the outcome of the others


class Groups:
    """The version of each group. The caller ensures that one thread at a time uses it."""

    def __init__(self) -> None:
        self.listeners: set[Callable[[str], object]] = set()
        """Called with a group when the outcome of its requests settles what other requests of it wait for."""
        self._open: dict[str, _Group] = {}  # with running requests; never dropped
        self._answered: OrderedDict[str, _Group] = OrderedDict()  # without running requests; the latest last

    def version(self, group_id: str) -> int | None:
        """Return the version that a group is on; ``None`` if it has none yet, or no longer has one."""
        group = self._find(group_id)
        return None if group is None else group.version

    def _find(self, group_id: str) -> _Group | None:
        return self._open.get(group_id) or self._answered.get(group_id)

    def may_begin_again(self, group_id: str) -> bool:
        """Whether a group's version depends on running requests; if so, the outcome that settles it is reported."""
        group = self._find(group_id)
        if group is None or group.answered:
            return False
        group.awaited = True
        return True

    def join(self, group_id: str, version: int) -> Callable[[bool | None], None]:
        """Count a request of a group; return a function to be called with whether it was answered.

        A group is on the version of its first request until all its requests ended without an answer; then it begins
        again. With one answer of a version out, the others must be of that version too.
        """
        group = self._open.get(group_id) or self._answered.pop(group_id, None) or _Group(version)
        self._open[group_id] = group
        group.open += 1

        def over(answered: bool | None) -> None:
            group.open -= 1
            group.answered |= bool(answered)
            if not group.open:
                del self._open[group_id]
                if group.answered:  # else it starts again
                    self._answered[group_id] = group
                    if len(self._answered) > MOST_GROUPS:
                        self._answered.popitem(last=False)
            if group.awaited and (group.answered or not group.open):
                group.awaited = False
                for listener in self.listeners:
                    listener(group_id)

        return over


class Recovery(Enum):
    """What brings a replica back that does not serve."""

    NOBODY = "nobody"
    SUPERVISOR = "supervisor"  # restarts it
    UPDATE = "update"  # it was restarted, and lacks the weights that the user's next update brings


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """A replica's own value: the share of KV blocks in use, 0 to 1; when it was read; requests in flight then.

    ``at`` is infinite for a value that the replica sent by itself: it is used until the next.
    """

    share: float
    at: float
    inflight: int


@dataclass(slots=True, eq=False)
class TableEntry:
    """One line of the replica table. Read it anywhere; only the table changes it, since others track its changes."""

    index: int
    replica: Replica
    state: ReplicaState = ReplicaState.STARTING
    version: int = 0
    inflight: int = 0  # requests sent from here that have not ended
    polled: int = 0  # what the replica itself reported, while that is recent
    polled_at: float = 0.0
    chosen: int = -1  # when it was last chosen, on the replica table's own clock
    change: int = 0  # the last change of the table that was one of this replica
    cache: int = -1  # a unique number; a new one whenever the replica loses its cached prefixes
    usage: CacheUsage | None = None
    stats: ReplicaStats | None = None  # the last that the replica sent by itself and the replica table read
    breaker: Breaker = field(default_factory=lambda: Breaker(FaultPolicy()))
    recovery: Recovery = Recovery.NOBODY
    lacks: int | None = None  # the newest version when it began to wait for an update; None: it does not
    restarts: int = 0
    leaving: bool = False  # it is being removed: it takes nothing new, and is not restarted
    joining: bool = False  # it was added, and has not served yet
    reserved: bool = False  # for one request, which has it to itself once it is idle
    removed: bool = False  # it is DEAD for good, and no longer listed
    last_error: str | None = None  # its last error
    not_finite: int = 0  # log-probs of its answers that were NaN or infinite
    bad_version: int = -1  # the version that was logged for these

    @property
    def may_take(self) -> bool:
        return self.state is ReplicaState.SERVING and not (self.breaker.blocks or self.leaving or self.reserved)

    @property
    def load(self) -> int:
        """Requests in flight: a report can only add to what was counted here."""
        return self.inflight if self.inflight >= self.polled else self.polled

    def __repr__(self) -> str:
        return f"#{self.index} {self.state.name} v{self.version} inflight={self.inflight}"


class Candidates:
    """Entries that may take a request; a sequence, as far as ``len``, iteration and ``[position]`` go."""

    def __init__(self, entries: Iterable[TableEntry]) -> None:
        self._by_index = {entry.index: entry for entry in entries}
        self.by_cache = {entry.cache: entry for entry in self._by_index.values()}
        self._entries = list(self._by_index.values())
        self._queue: list[tuple[int, int, int]] | None = None  # (load, chosen, index)
        self.total = sum(entry.load for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[TableEntry]:
        return iter(self._entries)

    def __getitem__(self, position: int) -> TableEntry:
        return self._entries[position]

    def find(self, index: int) -> TableEntry | None:
        return self._by_index.get(index)

    def least_loaded(self) -> TableEntry:
        """Return the candidate of least load; among equals, the one that was chosen longest ago.

        Ties by position would pile everything onto the first replica, or starve it whenever candidates come and go.
        """
        if self._queue is None:
            self._queue = [(entry.load, entry.chosen, entry.index) for entry in self._entries]
            heapq.heapify(self._queue)
        while True:
            load, chosen, index = self._queue[0]
            entry = self._by_index[index]
            if entry.chosen == chosen and entry.load == load:
                return entry
            heapq.heappop(self._queue)

    def moved(self, entry: TableEntry, change: int) -> None:
        """Note that a replica was chosen, or that its load changed by so much."""
        if entry.index not in self._by_index:
            return
        self.total += change
        if self._queue is not None:
            heapq.heappush(self._queue, (entry.load, entry.chosen, entry.index))
            if len(self._queue) > 4 * len(self._entries) + 64:
                self._queue = None  # mostly obsolete: rebuilt when next asked for


def load_bound(candidates: Candidates, threshold: float, margin: float) -> float:
    """Return the load that no candidate may exceed with one more request, for reasons other than load.

    The larger of ``threshold`` times the mean and ``margin`` above it, the new request counted (consistent hashing
    with bounded loads, arXiv 1608.01350, with a floor for small means).
    """
    mean = (candidates.total + 1) / len(candidates)
    return max(threshold * mean, mean + margin)


SHOWN = 8  # replicas that a repr lists one by one


class ReplicaTable:
    """The replicas of one service, under one lock."""

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
