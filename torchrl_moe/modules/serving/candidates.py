"""The replicas that may take a request, as a strategy sees them: live stats, and quick access to the least loaded.

A fleet may have a thousand replicas, and every request asks for the least loaded of them. So their order is kept in a
heap that follows each change; obsolete heap entries are dropped when they reach the top.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from torchrl_moe._checks import check_bool, check_number

if TYPE_CHECKING:
    from torchrl_moe.modules.backends.replica import Replica, ReplicaStats


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
        start: time that an engine gets to start.
        attempts: how many replicas may die under one request before the request fails. Those that may have killed a
            replica are tried again alone, on a replica that runs nothing else meanwhile; 1: nothing is tried again.
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
                self._close(group_id)
            if group.awaited and (group.answered or not group.open):
                group.awaited = False
                for listener in self.listeners:
                    listener(group_id)

        return over

    def _close(self, group_id: str) -> None:
        """Note that no request of a group is running; a group without an answer starts again."""
        group = self._open.pop(group_id)
        if group.answered:
            self._answered[group_id] = group
            if len(self._answered) > MOST_GROUPS:
                self._answered.popitem(last=False)


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
        self._by_cache = {entry.cache: entry for entry in self._by_index.values()}
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

    def with_cache(self, cache: int) -> TableEntry | None:
        """Return the candidate whose cache has this number, or ``None``."""
        return self._by_cache.get(cache)

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
