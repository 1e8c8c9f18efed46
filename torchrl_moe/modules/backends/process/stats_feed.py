"""The engine's stats, sent to the driver unasked, a few times a second, when they have changed.

The driver keeps the last ones, so reading them costs the engine nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable

from torchrl_moe.modules.backends.reports import ReplicaStats

__all__ = ["Load", "StatsFeed"]

FEED_SECONDS = 0.25
RATE_READINGS = 5  # the rate is that of the last second


@dataclasses.dataclass(slots=True)
class Load:
    """The engine's report of its last step, and counts since it started; :class:`ReplicaStats` explains most of it.

    ``tokens`` counts generated tokens as they are made, not when their request ends.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_at: float = 0.0


class StatsFeed:
    """Sends stats that have changed, and adds the rate at which tokens are generated.

    Args:
        load: counts the tokens.
        read: returns the current stats.
        send: sends a message to the driver.
        clock: seconds.
    """

    def __init__(
        self,
        load: Load,
        read: Callable[[], ReplicaStats],
        send: Callable[[tuple[str, ReplicaStats]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._read = read
        self._send = send
        self._clock = clock
        self._sent: ReplicaStats | None = None
        self._readings: deque[tuple[float, int]] = deque([(clock(), load.tokens)], RATE_READINGS)
        self._rate = 0.0

    def stats(self) -> ReplicaStats:
        """Return the current stats."""
        return dataclasses.replace(self._read(), tokens_per_second=self._rate)

    def tick(self) -> None:
        """Take a reading, and send the stats if they are not those sent before."""
        self._readings.append((self._clock(), self._load.tokens))
        (first_at, first), (last_at, last) = self._readings[0], self._readings[-1]
        self._rate = (last - first) / (last_at - first_at) if last_at > first_at else 0.0
        stats = self.stats()
        if stats != self._sent:
            self._sent = stats
            self._send(("stats", stats))

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(FEED_SECONDS)
