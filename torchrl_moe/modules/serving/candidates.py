"""The replicas that may take a request, as a strategy sees them: live stats, and quick access to the least loaded.

A fleet may have a thousand replicas, and every request asks for the least loaded of them. So their order is kept in a
heap that follows each change; obsolete heap entries are dropped when they reach the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torchrl_moe.modules.serving.breaker import Breaker
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.states import ReplicaState

__all__ = ["CacheUsage", "Candidates", "Recovery", "TableEntry", "load_bound"]


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
    replica: Any
    state: ReplicaState = ReplicaState.STARTING
    version: int = 0
    inflight: int = 0  # requests sent from here that have not ended
    polled: int = 0  # what the replica itself reported, while that is recent
    polled_at: float = 0.0
    chosen: int = -1  # when it was last chosen, on the replica table's own clock
    change: int = 0  # the last change of the table that was one of this replica
    cache: int = -1  # a unique number; a new one whenever the replica loses its cached prefixes
    usage: CacheUsage | None = None
    stats: Any = None  # the last that the replica sent by itself and the replica table read
    breaker: Breaker = field(default_factory=lambda: Breaker(FaultPolicy()))
    recovery: Recovery = Recovery.NOBODY
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
        """Whether it takes new requests."""
        return self.state is ReplicaState.SERVING and not (self.breaker.barred or self.leaving or self.reserved)

    @property
    def load(self) -> int:
        """Requests in flight: a report can only add to what was counted here."""
        return self.inflight if self.inflight >= self.polled else self.polled

    def __repr__(self) -> str:
        return f"#{self.index} {self.state.name} v{self.version} inflight={self.inflight}"


class Candidates:
    """Entries that may take a request; a sequence, as far as ``len``, iteration and ``[position]`` go.

    Attributes:
        total: sum of their loads.
    """

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
        """Return a candidate by its replica's index, or ``None``."""
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
