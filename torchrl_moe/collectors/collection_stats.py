"""The counts of a collector, under the names of TorchRL's scripts where they have one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from torchrl_moe.collectors.group import Group

__all__ = ["CollectionStats"]


class CollectionStats:
    """Counts of a collector, and metrics of its last batch. One thread writes; any may read.

    Attributes:
        in_flight: answers that are being generated.
        failures: groups that failed in their environment, their reward, or the engine.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._in_flight = 0
        self._began = time.monotonic()
        self._changed_at = self._began
        self._idle = 0.0  # seconds without an answer in flight
        self._drops: Counter[str] = Counter()
        self._sampled = [0, 0]  # answers, tokens: of all groups that were completed
        self._trained = [0, 0]
        self._batch: dict[str, float] = {}

    @property
    def in_flight(self) -> int:
        """Answers that are being generated."""
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        now = time.monotonic()
        if not self._in_flight:
            self._idle += now - self._changed_at
        self._changed_at = now
        self._in_flight = count

    def completed(self, group: Group) -> None:
        """Count a group that may be trained on."""
        self._sampled[0] += 1
        self._sampled[1] += group.tokens

    def dropped(self, reason: str) -> None:
        """Count a group that is dropped and replaced."""
        self._drops[reason] += 1

    def gave_out(self, groups: Sequence[Group], version: int) -> None:
        """Set the metrics of a batch that is trained on at a version."""
        now = time.monotonic()
        ages = [max(version - group.oldest, 0) for group in groups]
        segments = [int(row) for group in groups if group.rows is not None for row in _segments(group)]
        for group in groups:
            self._trained[0] += 1
            self._trained[1] += group.tokens
        self._batch = {
            "inference/staleness_mean": sum(ages) / len(ages),
            "inference/staleness_max": float(max(ages)),
            "inference/queue_age": sum(now - group.ready_at for group in groups) / len(groups),
            "collector/partial_ratio": sum(count > 1 for count in segments) / len(segments),
            "collector/max_segments": float(max(segments)),
        }

    def scalars(self) -> dict[str, float]:
        """Return all metrics by name, for a logger."""
        now = time.monotonic()
        seconds = max(now - self._began, 1e-9)
        idle = self._idle + (0.0 if self._in_flight else now - self._changed_at)
        found = {
            **self._batch,
            "inference/in_flight": float(self._in_flight),
            "inference/idle": idle / seconds,
            "collector/failures": float(self.failures),
            "collector/refills": float(sum(self._drops.values())),
        }
        found |= {f"collector/groups_dropped/{reason}": float(count) for reason, count in sorted(self._drops.items())}
        if self._trained[0] and self._sampled[1]:
            trained, sampled = (tokens / groups for groups, tokens in (self._trained, self._sampled))
            found["collector/length_trained_over_sampled"] = trained / sampled
        return found


def _segments(group: Group) -> list[int]:
    assert group.rows is not None
    return [int(row.get("num_segments")) for row in group.rows.unbind(0)]
