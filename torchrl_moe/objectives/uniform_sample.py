"""A bounded uniform sample of a stream of numbers, for quantiles, which cannot be accumulated as sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_moe._checks import check_number

__all__ = ["UniformSample"]

Values = np.ndarray[Any, np.dtype[np.float64]]


class UniformSample:
    """Keeps up to ``capacity`` numbers of a stream; every subset of that size is equally likely.

    Each number draws a random priority, and the numbers with the lowest priorities are kept, so merging two samples
    gives a sample of the joined streams. Up to ``capacity`` numbers, all are kept. It has its own random generator.

    >>> sample = UniformSample(capacity=100)
    >>> sample.add(np.arange(50))
    >>> len(sample), float(np.quantile(sample.values, 0.5))
    (50, 24.5)
    """

    def __init__(self, capacity: int = 1 << 16, seed: int | None = None) -> None:
        check_number("capacity", capacity, 1, whole=True)
        self.capacity = capacity
        self._random = np.random.default_rng(seed)
        self._values: Values = np.empty(0)
        self._priorities: Values = np.empty(0)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> Values:
        """float64 ``[n]``, in no order."""
        return self._values

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """Add numbers, of any shape."""
        flat = np.asarray(values, dtype=np.float64).reshape(-1)
        self._keep(flat, self._random.random(len(flat)))

    def merge(self, other: UniformSample) -> None:
        """Add the numbers of another sample, of another stream."""
        self._keep(other._values, other._priorities)

    def _keep(self, values: Values, priorities: Values) -> None:
        self._values = np.concatenate([self._values, values])
        self._priorities = np.concatenate([self._priorities, priorities])
        if len(self._values) > self.capacity:
            least = np.argpartition(self._priorities, self.capacity)[: self.capacity]
            self._values, self._priorities = self._values[least], self._priorities[least]
