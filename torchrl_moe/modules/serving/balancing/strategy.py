"""The base class of balancing strategies, and what they know of a request."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_moe._checks import check_number
from torchrl_moe.modules.serving.candidates import Candidates, TableEntry

__all__ = ["RoutingContext", "Strategy", "check_overload_threshold", "check_prefix_length"]


def check_prefix_length(value: Any) -> None:
    """Refuse another value than a number of tokens, or ``None`` for all."""
    check_number("prefix_length", value, 1, whole=True, none=True)


def check_overload_threshold(value: Any) -> None:
    """Refuse another value than a multiple of the mean load."""
    check_number("overload_threshold", value, 1, infinite=True, hint="1 is the mean load itself.")


@dataclass(slots=True, kw_only=True, eq=False)
class RoutingContext:
    """What is known of a request when it is placed: prompt (text, token ids, a chat), session, the caller's context."""

    prompt: Any = None
    session_id: str | None = None
    request_context: Mapping[str, Any] = field(default_factory=dict)


class Strategy(abc.ABC):
    """A way of choosing a replica. It does no I/O and needs no lock: the balancer makes one call at a time.

    Attributes:
        name: as users know it.
        reads_stats: whether it reads the stats that replicas send, ``usage`` of a candidate.
    """

    name: str
    reads_stats = False

    @abc.abstractmethod
    def choose(self, candidates: Candidates, context: RoutingContext) -> int | None:
        """Return the index of one of the candidates (there is at least one), or ``None`` for no opinion."""

    def placed(self, entry: TableEntry, context: RoutingContext) -> None:  # noqa: B027  most have nothing to learn
        """Learn that a request went to a replica, whichever strategy chose."""

    def finish_session(self, session_id: str) -> None:  # noqa: B027  most know no sessions
        """Forget a session that has ended."""
