"""``StepClock``: seconds of each phase of a training step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StepClock"]


class StepClock:
    """Counts seconds by phase.

    Attributes:
        seconds: phase -> seconds, of this step.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Begin a step, and its first phase."""
        self.seconds = {}
        self.begin_phase()

    def begin_phase(self) -> None:
        """Begin a phase that :meth:`end` ends."""
        self._began = time.perf_counter()

    def end(self, phase: str) -> None:
        """Count the time since :meth:`begin_phase` towards a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - self._began

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the context towards a phase."""
        self.begin_phase()
        try:
            yield
        finally:
            self.end(phase)
