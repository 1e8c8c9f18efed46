"""How a service handles faults: when it restarts, probes or avoids a replica, and how often a request is tried."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_moe._checks import check_bool, check_number

__all__ = ["FaultPolicy"]

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
