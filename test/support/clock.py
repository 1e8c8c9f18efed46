"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Shows ``now``."""

    now = 0.0

    def __call__(self) -> float:
        return self.now
