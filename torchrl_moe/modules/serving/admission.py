"""How many requests the service has in flight at a time, and whose turn is next.

A request that finds the service full waits here, as one number in its call's ticket, not as a message in an engine.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable

__all__ = ["PRIORITY_SECONDS", "Admission", "Ticket"]

PRIORITY_SECONDS = 30.0


class Ticket:
    """The requests of one call that wait for a place.

    Args:
        priority: lower goes first, as in vLLM.
        ring: called, from any thread, when places were granted; it must return at once.
    """

    __slots__ = ("granted", "key", "priority", "queued", "ring", "wanted")

    def __init__(self, priority: int, ring: Callable[[], object]) -> None:
        self.priority = priority
        self.ring = ring
        self.key: tuple[float, int] | None = None  # its turn, from its first request for a place on
        self.queued = False
        self.wanted = 0
        self.granted = 0


class Admission:
    """Places for requests, granted by priority, and in order of arrival within one.

    Nobody starves: a priority one higher counts as having come 30 seconds later, so whoever has waited that much
    longer goes first. Those who come later are never ahead of the same priority, whatever they ask for.

    Args:
        limit: how many places; ``None`` for no limit.
        clock: seconds.
    """

    def __init__(self, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_concurrent_requests must be at least 1, or None for no limit, got {limit}")
        self.limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._taken = 0
        self._numbers = itertools.count()
        self._queue: list[tuple[tuple[float, int], Ticket]] = []

    @property
    def taken(self) -> int:
        """Places granted and not given back."""
        return self._taken

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        with self._lock:
            return sum(ticket.wanted for _, ticket in self._queue)

    def ask(self, ticket: Ticket, total: int) -> int:
        """Want so many places from now on, and take those that were granted; 0 withdraws the ticket."""
        with self._lock:
            if ticket.key is None:
                ticket.key = self._clock() + ticket.priority * PRIORITY_SECONDS, next(self._numbers)
            self._taken -= max(ticket.granted - total, 0)
            ticket.granted = min(ticket.granted, total)
            ticket.wanted = total - ticket.granted
            if ticket.wanted and not ticket.queued:
                ticket.queued = True
                heapq.heappush(self._queue, (ticket.key, ticket))
            self._grant(asking=ticket)
            granted, ticket.granted = ticket.granted, 0
            return granted

    def give_back(self, count: int = 1) -> None:
        """Give places back; whoever is next gets them."""
        with self._lock:
            self._taken -= count
            self._grant()

    def _grant(self, asking: Ticket | None = None) -> None:
        """Hand out what is free, under the lock; ring those that did not just ask."""
        while self._queue:
            ticket = self._queue[0][1]
            count = int(min(self._free(), ticket.wanted))
            if count <= 0 < ticket.wanted:
                return
            ticket.wanted -= count
            ticket.granted += count
            self._taken += count
            if not ticket.wanted:
                ticket.queued = False
                heapq.heappop(self._queue)
            if count and ticket is not asking:
                ticket.ring()

    def _free(self) -> float:
        return math.inf if self.limit is None else self.limit - self._taken
