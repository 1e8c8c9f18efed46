"""How many requests the engines have at a time, and which request is next.

A request that finds the service full waits here, as one small record, not as a message in an engine.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable

from torchrl_moe.modules.serving.in_flight import InFlight

__all__ = ["PRIORITY_SECONDS", "Admission"]

PRIORITY_SECONDS = 30.0


class Admission:
    """Places for requests, given by priority, and in order of arrival within one. It belongs to one thread.

    No request starves: a priority one higher counts as having come 30 seconds later, so a request that has waited that
    much longer goes first. One that comes later is never ahead of the same priority.

    Args:
        limit: how many places; ``None`` for no limit.
        clock: seconds.
    """

    def __init__(self, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_concurrent_requests must be at least 1, or None for no limit, got {limit}")
        self.limit = limit
        self.taken = 0
        """Places given and not given back."""
        self._clock = clock
        self._numbers = itertools.count()
        self._queues: dict[int, OrderedDict[InFlight, None]] = {}  # by priority, in order of arrival

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return sum(map(len, self._queues.values()))

    def put(self, request: InFlight) -> None:
        """Have a request wait for a place; one that waited before takes its old turn."""
        queue = self._queues.setdefault(request.request.priority, OrderedDict())
        queue[request] = None
        if request.arrived is None:
            request.arrived = self._clock(), next(self._numbers)
        else:
            queue.move_to_end(request, last=False)

    def remove(self, request: InFlight) -> bool:
        """Take a request out that waits for no place any more; whether it did."""
        queue = self._queues.get(request.request.priority, OrderedDict())
        if request not in queue:
            return False
        self._drop(request)
        return True

    def next(self) -> InFlight | None:
        """Give a place to the request that is next; ``None`` if there is no place, or none waits."""
        if not self._queues or (self.limit is not None and self.taken >= self.limit):
            return None
        request = min((next(iter(queue)) for queue in self._queues.values()), key=_turn)
        self._drop(request)
        self.taken += 1
        return request

    def give_back(self) -> None:
        """Give a place back."""
        self.taken -= 1

    def _drop(self, request: InFlight) -> None:
        queue = self._queues[request.request.priority]
        del queue[request]
        if not queue:
            del self._queues[request.request.priority]


def _turn(request: InFlight) -> tuple[float, int]:
    assert request.arrived is not None
    at, number = request.arrived
    return at + request.request.priority * PRIORITY_SECONDS, number
