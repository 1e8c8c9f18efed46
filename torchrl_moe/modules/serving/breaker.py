"""A circuit breaker: a replica that keeps failing gets no new requests for a while, then a few to try it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from torchrl_moe.modules.serving.fault_policy import FaultPolicy

__all__ = ["Breaker", "BreakerState"]


class BreakerState(Enum):
    """Closed is the normal state, as in electrics."""

    CLOSED = "closed"  # takes requests
    OPEN = "open"  # takes none, until it has cooled down
    HALF_OPEN = "half-open"  # takes a few trial requests: the first success closes it, a failure opens it again


class Breaker:
    """The breaker of one replica. Pure bookkeeping; the caller ensures that one thread at a time uses it.

    Args:
        policy: its limits.
        clock: seconds.

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
    def barred(self) -> bool:
        """Whether it blocks requests at the moment."""
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
        """Half-open it if it is open."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
