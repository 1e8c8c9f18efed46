"""How a service treats faults: when it restarts, doubts, avoids a replica, and how often a request is tried."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["FaultPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """The settings by which faults are judged; all times in seconds.

    Attributes:
        restart: whether replicas that died are started again.
        max_restarts: of one replica within ``restart_window``; one more, and it stays dead.
        restart_window: see ``max_restarts``.
        first_delay: before a restart; it doubles with each one in the window.
        longest_delay: what it doubles up to.
        start: that an engine has to start.
        attempts: how many replicas may die under one request before it is given up.
        probe: from one health probe to the next, and what a replica has to answer one; ``inf`` for none at all.
        patience: without a sign of life, after which a replica counts as stalled and is ended.
        slow_patience: the same where the engine's processes compute: a long step gives no other sign.
        breaker_failures: within ``breaker_window``, that keep new requests from a replica.
        breaker_window: see ``breaker_failures``.
        breaker_cooldown: until it is tried again.
        breaker_trials: requests at a time that try it.

    Raises:
        ValueError: a figure out of range.
    """

    restart: bool = True
    max_restarts: int = 10
    restart_window: float = 300.0
    first_delay: float = 0.5
    longest_delay: float = 15.0
    start: float = 600.0
    attempts: int = 3
    probe: float = 10.0
    patience: float = 30.0
    slow_patience: float = 300.0
    breaker_failures: int = 5
    breaker_window: float = 60.0
    breaker_cooldown: float = 10.0
    breaker_trials: int = 3

    def __post_init__(self) -> None:
        least = {"attempts": 1, "breaker_failures": 1, "breaker_trials": 1}
        for field in fields(self):
            value = getattr(self, field.name)
            if value < least.get(field.name, 0):
                raise ValueError(f"{field.name} must be at least {least.get(field.name, 0)}, got {value}")
        if self.probe == 0:
            raise ValueError("probe must be positive, got 0")

    def delay(self, recent: int) -> float:
        """Return how long to wait before a restart, after so many recent ones.

        >>> [FaultPolicy(first_delay=0.5, longest_delay=3).delay(n) for n in range(5)]
        [0.5, 1.0, 2.0, 3, 3]
        """
        return min(self.first_delay * 2.0 ** min(recent, 60), self.longest_delay)
