"""Admission: how many requests the engines run at a time, and which request is next.

A request that arrives when the service is full waits here, as one small record, not as a message in an engine.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

from torchrl_moe._checks import check_number
from torchrl_moe.modules.serving.in_flight import InFlight

__all__ = ["PRIORITY_SECONDS", "Admission"]

PRIORITY_SECONDS = 30.0


class Admission:
    """Places for requests, given by priority, and by order of arrival within a priority. For one thread.

    No request starves: a priority number one higher counts like arriving 30 seconds later, so a request that has waited
    that much longer goes first. A later request is never ahead of one with the same priority. Each step costs the
    logarithm of the number of waiting requests.

    Args:
        limit: number of places; ``None`` for no limit.
        clock: seconds.
    """

    def __init__(self, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        check_number("max_concurrent_requests", limit, 1, whole=True, none=True)
        self.limit = limit
        self.taken = 0
        """Places in use."""
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, InFlight] = {}  # by number
        self._turns: list[tuple[float, int]] = []  # a heap: their turns, and some of requests that were removed

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def put(self, request: InFlight) -> None:
        """Queue a request for a place; one that waited before keeps its old turn."""
        if request.turn is None:
            at = self._clock() + request.request.priority * PRIORITY_SECONDS
            request.turn = at, next(self._numbers)
        self._waiting[request.turn[1]] = request
        heapq.heappush(self._turns, request.turn)

    def remove(self, request: InFlight) -> bool:
        """Remove a request from the queue; return whether it was there."""
        if request.turn is None or self._waiting.pop(request.turn[1], None) is None:
            return False
        if len(self._turns) > 2 * len(self._waiting) + 64:
            self._turns = [one.turn for one in self._waiting.values() if one.turn is not None]
            heapq.heapify(self._turns)
        return True

    def next(self) -> InFlight | None:
        """Give a place to the next request; ``None`` if there is no place, or none waits."""
        if not self._waiting or (self.limit is not None and self.taken >= self.limit):
            return None
        request = None
        while request is None:
            _, number = heapq.heappop(self._turns)
            request = self._waiting.pop(number, None)
        self.taken += 1
        return request

    def give_back(self) -> None:
        """Release a place."""
        self.taken -= 1
