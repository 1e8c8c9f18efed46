"""Strategies that look at load only. Clock and random numbers come from outside."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from torchrl_moe._checks import check_callable, check_instance, check_number
from torchrl_moe.modules.serving.balancing.strategy import RoutingContext, Strategy
from torchrl_moe.modules.serving.candidates import Candidates, TableEntry

__all__ = [
    "KVCache",
    "LeastRequests",
    "PowerOfTwo",
    "RoundRobin",
]

REPORT_SECONDS = 5.0  # how long a replica's own stats hold


class LeastRequests(Strategy):
    """The replica with the fewest requests in flight; among equals, the one that was chosen longest ago."""

    name = "requests"

    def choose(self, candidates: Candidates, context: RoutingContext) -> int:
        """Return the least loaded candidate."""
        del context
        return candidates.least_loaded().index


class RoundRobin(Strategy):
    """Each replica that may serve in turn, by index."""

    name = "round-robin"

    def __init__(self) -> None:
        self.next_index = 0

    def choose(self, candidates: Candidates, context: RoutingContext) -> int:
        """Return the next candidate at or after the turn, wrapping around."""
        del context
        indices = sorted(entry.index for entry in candidates)
        index = next((i for i in indices if i >= self.next_index), indices[0])
        self.next_index = index + 1
        return index


class PowerOfTwo(Strategy):
    """Of two candidates drawn at random, the less loaded one.

    Args:
        rng: draws them.
    """

    name = "power-of-two"

    def __init__(self, rng: random.Random | None = None) -> None:
        check_instance("rng", rng, random.Random, none=True)
        self._rng = rng or random.Random()

    def choose(self, candidates: Candidates, context: RoutingContext) -> int:
        """Return the less loaded of two."""
        del context
        first = self._rng.randrange(len(candidates))
        if len(candidates) == 1:
            return candidates[0].index
        second = self._rng.randrange(len(candidates) - 1)
        second += second >= first  # two different ones
        return min((candidates[first], candidates[second]), key=lambda entry: entry.load).index


class KVCache(Strategy):
    """The replica with the smallest share of its KV cache in use.

    The values are the replicas' own and lag. So each is corrected by the requests that started and ended here since, at
    the mean share of one request; else all requests would go to one replica until the next stats. A replica without
    fresh stats is estimated by its requests alone. No opinion if no stats are fresh.

    Args:
        clock: seconds, the clock by which stats were noted.
        max_age: seconds for which reported stats are used; those that a replica sends are used until its next.
    """

    name = "kv-cache"
    reads_stats = True

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_age: float = REPORT_SECONDS) -> None:
        check_callable("clock", clock)
        check_number("max_age", max_age, 0, infinite=True)
        self._clock = clock
        self.max_age = max_age

    def choose(self, candidates: Candidates, context: RoutingContext) -> int | None:
        """Return the candidate of least estimated usage; of equals, the least loaded."""
        del context
        oldest = self._clock() - self.max_age
        fresh = {e.index: e.usage for e in candidates if e.usage is not None and e.usage.at >= oldest}
        if not fresh:
            return None
        requests = sum(usage.inflight for usage in fresh.values())
        share = sum(usage.share for usage in fresh.values()) / requests if requests else 0.0

        def estimate(entry: TableEntry) -> tuple[float, int, int]:
            usage = fresh.get(entry.index)
            known = 0.0 if usage is None else usage.share - share * usage.inflight
            return known + share * entry.inflight, entry.load, entry.chosen

        return min(candidates, key=estimate).index
