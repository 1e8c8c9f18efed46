"""Strategies: who should take the next request. Pure objects that answer a replica, or ``None`` for no opinion.

A strategy sees the candidates (the replicas that may take the request) and the request's context; it does no I/O and
needs no lock, since the balancer asks one question at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchrl_moe.modules.serving.roster import RosterEntry

__all__ = ["STRATEGIES", "LeastRequests", "RoundRobin", "RoutingContext", "Strategy", "make_strategy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingContext:
    """What is known of a request when it is placed: prompt (text or token ids), session, the user's own words."""

    prompt: Any = None
    session_id: str | None = None
    request_context: Mapping[str, Any] = field(default_factory=dict)


class Strategy(Protocol):
    """One way of choosing."""

    name: str

    def choose(self, candidates: Sequence[RosterEntry], context: RoutingContext) -> int | None:
        """Return the index of one of the candidates (there is at least one), or ``None``."""


class LeastRequests:
    """The replica with the fewest requests in flight; among equals, the one that was chosen longest ago.

    Ties by position would pile everything onto the first replica, or starve it whenever candidates come and go.
    """

    name = "requests"

    def choose(self, candidates: Sequence[RosterEntry], context: RoutingContext) -> int:
        """Return the least loaded candidate."""
        del context
        return min(candidates, key=lambda entry: (entry.inflight, entry.chosen, entry.index)).index


class RoundRobin:
    """Each replica in turn, by index, whichever of them may serve at the moment."""

    name = "round-robin"

    def __init__(self) -> None:
        self.next_index = 0

    def choose(self, candidates: Sequence[RosterEntry], context: RoutingContext) -> int:
        """Return the next candidate at or after the turn, wrapping around."""
        del context
        indices = sorted(entry.index for entry in candidates)
        index = next((i for i in indices if i >= self.next_index), indices[0])
        self.next_index = index + 1
        return index


STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "requests": LeastRequests,
    "least-loaded": LeastRequests,
    "round-robin": RoundRobin,
}


def make_strategy(strategy: str | Strategy) -> Strategy:
    """Return a strategy by name (hyphens or underscores), or the object as it is.

    Raises:
        ValueError: the name is not one of ours.
        TypeError: neither a name nor an object with ``name`` and ``choose``.
    """
    if isinstance(strategy, str):
        maker = STRATEGIES.get(strategy.replace("_", "-"))
        if maker is None:
            raise ValueError(f"unknown strategy {strategy!r}; valid strategies: {', '.join(sorted(STRATEGIES))}")
        return maker()
    is_strategy = callable(getattr(strategy, "choose", None)) and isinstance(getattr(strategy, "name", None), str)
    if isinstance(strategy, type) or not is_strategy:
        raise TypeError(
            f"a strategy is a name ({', '.join(sorted(STRATEGIES))}) or an object with a name and "
            f"choose(candidates, context), got {strategy!r}"
        )
    return strategy
