"""Strategies in order of precedence: the first that has an opinion wins, the least loaded if none has."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchrl_moe._checks import check_callable, check_instance
from torchrl_moe.modules.serving.balancing.prefix_aware import PrefixAware
from torchrl_moe.modules.serving.balancing.sessions import SessionAffinity
from torchrl_moe.modules.serving.balancing.simple import (
    KVCache,
    LeastRequests,
    PowerOfTwo,
    RoundRobin,
)
from torchrl_moe.modules.serving.balancing.strategy import (
    RoutingContext,
    Strategy,
    check_overload_threshold,
    check_prefix_length,
)
from torchrl_moe.modules.serving.candidates import Candidates, TableEntry

__all__ = ["DEFAULT_HIERARCHY", "STRATEGIES", "Hierarchy", "Settings", "make_strategy"]

DEFAULT_HIERARCHY = ("prefix-aware", "requests")
OVERLOAD_THRESHOLD = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of strategies made by name; see their arguments."""

    prefix_length: int | None = None
    overload_threshold: float = OVERLOAD_THRESHOLD
    clock: Callable[[], float] = time.monotonic
    rng: random.Random | None = None

    def __post_init__(self) -> None:
        check_prefix_length(self.prefix_length)
        check_overload_threshold(self.overload_threshold)
        check_callable("clock", self.clock)
        check_instance("rng", self.rng, random.Random, none=True)


STRATEGIES: Mapping[str, Callable[[Settings], Strategy]] = {
    "prefix-aware": lambda s: PrefixAware(s.prefix_length, s.overload_threshold),
    "session": lambda s: SessionAffinity(s.overload_threshold, clock=s.clock),
    "requests": lambda _: LeastRequests(),
    "least-loaded": lambda _: LeastRequests(),
    "kv-cache": lambda s: KVCache(s.clock),
    "power-of-two": lambda s: PowerOfTwo(s.rng),
    "round-robin": lambda _: RoundRobin(),
}


def make_strategy(strategy: str | Strategy, settings: Settings | None = None) -> Strategy:
    """Return a strategy by name (hyphens or underscores), or the object as it is.

    Raises:
        ValueError: the name is not one of ours.
        TypeError: neither a name nor a :class:`Strategy`.
    """
    if isinstance(strategy, str):
        maker = STRATEGIES.get(strategy.replace("_", "-"))
        if maker is None:
            raise ValueError(f"unknown strategy {strategy!r}; valid strategies: {', '.join(sorted(STRATEGIES))}")
        return maker(settings or Settings())
    if isinstance(strategy, Strategy):
        return strategy
    raise TypeError(
        f"a strategy is a name ({', '.join(sorted(STRATEGIES))}) or an object of a class derived from Strategy "
        f"({Strategy.__module__}), got {strategy!r}"
    )


class Hierarchy:
    """Strategies in order of precedence.

    A strategy that raises, or returns a replica that may not take the request, counts as having no opinion; a warning
    is shown once.

    Args:
        strategies: names or objects, at least one.
        settings: for those made by name.

    Raises:
        ValueError: an unknown name, or no strategy at all.
    """

    def __init__(self, strategies: str | Strategy | Sequence[str | Strategy], settings: Settings) -> None:
        listed = (
            list(strategies) if isinstance(strategies, Sequence) and not isinstance(strategies, str) else [strategies]
        )
        if not listed:
            raise ValueError(
                "strategy is empty: name at least one, for example 'requests'; valid strategies: "
                + ", ".join(sorted(STRATEGIES))
            )
        self.strategies = [make_strategy(item, settings) for item in listed]
        self._warned: set[int] = set()

    def choose(self, candidates: Candidates, context: RoutingContext) -> TableEntry:
        """Return the replica that takes the request."""
        for strategy in self.strategies:
            try:
                index = strategy.choose(candidates, context)
                entry = None if index is None else candidates.find(index)
            except Exception as error:  # noqa: BLE001  user code; requests must still be placed
                self._warn(strategy, f"failed with {error!r}")
                continue
            if entry is not None:
                return entry
            if index is not None:
                allowed = ", ".join(str(candidate.index) for candidate in candidates)
                self._warn(strategy, f"chose replica {index!r}, not one of {allowed}")
        return candidates.least_loaded()

    def placed(self, entry: TableEntry, context: RoutingContext) -> None:
        """Notify strategies of where a request went."""
        for strategy in self.strategies:
            try:
                strategy.placed(entry, context)
            except Exception as error:  # noqa: BLE001  as above
                self._warn(strategy, f"failed to learn with {error!r}")

    def _warn(self, strategy: Strategy, what: str) -> None:
        if id(strategy) not in self._warned:
            self._warned.add(id(strategy))
            warnings.warn(f"strategy {strategy.name!r} {what}; the next strategy is used. Shown once.", stacklevel=4)

    def finish_session(self, session_id: str) -> None:
        """Notify strategies that a session has ended."""
        for strategy in self.strategies:
            strategy.finish_session(session_id)

    @property
    def reads_stats(self) -> bool:
        """Whether some strategy reads the replicas' own stats."""
        return any(strategy.reads_stats for strategy in self.strategies)

    @property
    def turn(self) -> int:
        """The round robin's next index; 0 without one."""
        return next((strategy.next_index for strategy in self.strategies if isinstance(strategy, RoundRobin)), 0)
