"""The history of a collector: batches, waits, answers in flight, weight updates. Of bounded size; knows no engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from tensordict import TensorDictBase

__all__ = ["OTHERS", "CollectionRecord"]

LIMIT = 10_000
REPLICAS = 16
OTHERS = -1
"""Stands for all replicas beyond the first 16."""
SAMPLE_SECONDS = 0.1


class CollectionRecord:
    """History of a collector, the newest entries of each kind. Thread-safe; times are seconds of ``clock``.

    Args:
        limit: how many batches, waits, samples of answers in flight, and updates are kept; 10 000 take 25 MB.
        clock: monotonic seconds.

    Attributes:
        batch: the last batch that was yielded, not a copy; ``None`` before the first.
        batches: how many were yielded, including those no longer kept.
        waited: seconds that the trainer has waited for batches.
        taker: what takes the batches, for plots.

    >>> record = CollectionRecord()
    >>> with record.wait():
    ...     pass
    >>> [phase["phase"] for phase in record.phases()]
    ['waiting for a batch']
    """

    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self._clock = clock
        self._limit = limit
        self._began = clock()
        self._lock = threading.Lock()
        self.batch: TensorDictBase | None = None
        self.batches = 0
        self.waited = 0.0
        self.taker = "trainer"
        self._waited_before = 0.0  # for the batches that were yielded
        self._waiting_since: float | None = None
        self._rows: deque[dict[str, Any]] = deque(maxlen=limit)
        self._waits: deque[tuple[float, float]] = deque(maxlen=limit)
        self._samples: deque[tuple[float, dict[int, int]]] = deque(maxlen=limit)
        self._sampled_at = float("-inf")
        self._updates: deque[tuple[float, int]] = deque(maxlen=limit)

    # -- notes ------------------------------------------------------------------------------------------------------

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Record how long the trainer waits in the context, however it ends."""
        began = self._waiting_since = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._waiting_since = None
                self._waits.append((began, self._clock()))
                self.waited += self._clock() - began

    def add(self, batch: TensorDictBase, metrics: Mapping[str, Any]) -> None:
        """Record a batch that is yielded. It is kept, not copied, until the next one.

        Args:
            batch: the batch.
            metrics: of the batch, plain numbers by name.
        """
        with self._lock:
            waited = self.waited - self._waited_before
            self._rows.append({"time": datetime.now(UTC), "batch": self.batches, "waited": waited, **metrics})
            self.batch, self.batches, self._waited_before = batch, self.batches + 1, self.waited

    def in_flight(self, counts: Iterable[tuple[int, int]]) -> None:
        """Record how many answers each replica is generating, unless the last sample is recent enough.

        A change is recorded at most ten times a second, and less often as time goes by, so that the samples always
        cover more than half of the past.

        Args:
            counts: index and answers of each replica; not read if the last sample is recent enough.
        """
        now = self._clock()
        if now - self._sampled_at < max(SAMPLE_SECONDS, (now - self._began) / self._limit):
            return
        sample: dict[int, int] = {}
        for position, (index, count) in enumerate(counts):
            key = index if position < REPLICAS else OTHERS
            sample[key] = sample.get(key, 0) + count
        with self._lock:
            self._sampled_at = now
            if not self._samples or self._samples[-1][1] != sample:
                self._samples.append((now, sample))

    def updated(self, version: int) -> None:
        """Record that the engine has new weights."""
        with self._lock:
            self._updates.append((self._clock(), version))

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def last(self) -> Mapping[str, Any]:
        """The metrics of the last batch; empty before the first."""
        with self._lock:
            return self._rows[-1] if self._rows else {}

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each batch: ``time`` (UTC), ``batch`` (from 0), ``waited`` (s), and those given."""
        with self._lock:
            return list(self._rows)

    def scalars(self) -> dict[str, float]:
        """Return the share of the time that the trainer waited, and the seconds."""
        seconds = max(self._clock() - self._began, 1e-9)
        return {"training/idle": self.waited / seconds, "collector/wait_for_batch": self.waited}

    @property
    def end(self) -> float:
        """Seconds from the start to the last recorded event; a wait in progress lasts until now."""
        with self._lock:
            if self._waiting_since is not None:
                return self._clock() - self._began
            last = [self._waits[-1][1]] if self._waits else []
            last += [notes[-1][0] for notes in (self._samples, self._updates) if notes]
            return max(last, default=self._began) - self._began

    def phases(self) -> list[dict[str, Any]]:
        """Return the trainer's phases: ``phase``, ``start`` and ``seconds``, in order; between two waits it trains."""
        end = self.end + self._began
        with self._lock:
            waits = list(self._waits)
            if self._waiting_since is not None:
                waits.append((self._waiting_since, max(end, self._waiting_since)))
        trained = [(one[1], other[0]) for one, other in pairwise([*waits, *([(end, end)] if waits else [])])]
        spans = [("waiting for a batch", *span) for span in waits] + [("training", *span) for span in trained]
        return [
            {"phase": phase, "start": start - self._began, "seconds": stop - start}
            for phase, start, stop in sorted(spans, key=lambda span: span[1:])
            if stop > start or phase != "training"
        ]

    def flights(self) -> dict[int, list[tuple[float, int]]]:
        """Return seconds and answers in flight, by replica (:data:`OTHERS`: beyond 16), each until the next entry."""
        with self._lock:
            samples = list(self._samples)
        known = sorted({index for _, sample in samples for index in sample}, key=lambda index: (index == OTHERS, index))
        return {index: [(at - self._began, sample.get(index, 0)) for at, sample in samples] for index in known}

    def updates(self) -> list[tuple[float, int]]:
        """Return seconds and version of each weight update."""
        with self._lock:
            return [(at - self._began, version) for at, version in self._updates]
