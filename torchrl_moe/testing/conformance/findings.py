"""What a check finds: a number, or a failure that cannot be given as a number."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DoesNotHold", "Finding", "RouteFaults"]


class DoesNotHold(Exception):
    """A check fails in a way that cannot be given as a number; the message says how."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: how far ``off`` the engine is, in the unit that ``seen`` names, and how far it may be."""

    off: float
    allowed: float
    seen: str


@dataclass(frozen=True, slots=True)
class RouteFaults:
    """How correct an answer's routes are: rows ``(token, layer)`` without a route, wrong rows, and ties.

    ``wrong`` is ``None`` where there is no model to compare with. ``largest`` is the largest gap of a router's scores.
    """

    rows: int
    missing: int
    wrong: int | None
    ties: int = 0
    largest: float = 0.0
    first: str = ""

    @property
    def count(self) -> int:
        """Number of missing and wrong rows."""
        return self.missing + (self.wrong or 0)

    @property
    def text(self) -> str:
        """In words."""
        judged = "no model to judge them" if self.wrong is None else f"{self.wrong} wrong, {self.ties} ties"
        return f"{self.rows} rows of tokens and layers: {self.missing} missing, {judged}{self.first}"
