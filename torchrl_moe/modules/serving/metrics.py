"""Outcomes and durations of a service's requests: counters, percentiles, histograms.

Every request counts once in ``requests`` and once more when its call ends, by its outcome as the caller sees it.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from torchrl_moe._errors import EngineError, GenerationTimeout, RequestRefusedError
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.serving.metrics_table import COUNTERS

__all__ = ["Histogram", "Metrics"]

SECONDS = ("queue_seconds", "first_token_seconds", "total_seconds")
BOUNDS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1.0, 2.5, 5.0))
MOST_RECENT = 2048

Finished: TypeAlias = Callable[[Sequence[Completion]], None]


class Histogram:
    """Durations in seconds: counts per bucket since the start, and percentiles of the most recent ones.

    Attributes:
        counts: int, per bucket: up to each of ``BOUNDS`` (1 ms to 500 s), the last for all above.
        total: sum of all values.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0
        self._recent: deque[float] = deque(maxlen=MOST_RECENT)

    def add(self, seconds: float) -> None:
        """Count one value."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds
        self._recent.append(seconds)

    def percentiles(self) -> dict[str, float]:
        """Return p50, p90 and p99 of the last 2048 values; nothing if there are none."""
        if not self._recent:
            return {}
        values = np.quantile(np.array(self._recent), (0.5, 0.9, 0.99)).tolist()
        return dict(zip(("p50", "p90", "p99"), values, strict=True))


class Metrics:
    """Counters and histograms of one service; safe to use from any thread.

    Args:
        enabled: whether anything is counted.

    >>> metrics = Metrics()
    >>> metrics.count("retried")
    >>> metrics.summary()["retried"]
    1
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()
        self._counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._histograms = {name: Histogram() for name in SECONDS}

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter.

        Raises:
            ValueError: there is no such counter.
        """
        if name not in self._counts:
            raise ValueError(f"no counter {name!r}; known: {', '.join(COUNTERS)}")
        if self.enabled:
            with self._lock:
                self._counts[name] += amount

    @contextlib.contextmanager
    def call(self, requests: int, whole: Sequence[Completion] = ()) -> Iterator[Finished]:
        """Count the requests of one call; the body passes its completions to the yielded function.

        Args:
            requests: how many.
            whole: completions of the call that are not among the requests because they were complete before.
        """
        before = set(map(id, whole))
        self.count("requests", requests)
        try:
            yield lambda completions: self._finish([one for one in completions if id(one) not in before])
        except EngineError as error:
            done = [one for one in error.partial if not one.aborted and id(one) not in before]
            self._finish(done)
            self.count(_outcome(error), requests - len(done))
            raise
        except ValueError:
            self.count("refused", requests)
            raise
        except BaseException:
            self.count("aborted", requests)
            raise

    def _finish(self, completions: Sequence[Completion]) -> None:
        if not self.enabled:
            return
        with self._lock:
            for completion in completions:
                self._counts["aborted" if completion.aborted else "completed"] += 1
                if completion.prompt_logprobs is None:  # else it was scored, and its one token is dropped
                    self._counts["sequences"] += len(completion.outputs)
                    self._counts["generated_tokens"] += sum(len(output.token_ids) for output in completion.outputs)
                self._counts["prompt_tokens"] += len(completion.prompt_token_ids)
                self._counts["cached_tokens"] += completion.num_cached_tokens
                self._counts["generation_seconds"] += completion.metrics.total_seconds
                for name, histogram in self._histograms.items():
                    histogram.add(getattr(completion.metrics, name))

    def summary(self) -> dict[str, float]:
        """Return all counters, and p50, p90, p99 of the seconds of the last 2048 requests, for a logger.

        Empty if metrics are off.
        """
        if not self.enabled:
            return {}
        with self._lock:
            summary = dict(self._counts)
            for name, histogram in self._histograms.items():
                summary |= {f"{name}_{key}": value for key, value in histogram.percentiles().items()}
            return summary

    def histograms(self) -> dict[str, tuple[list[int], float]]:
        """Return, by name, how many values fell in each bucket of ``BOUNDS`` and above, and the sum of all."""
        with self._lock:
            return {name: (list(h.counts), h.total) for name, h in self._histograms.items()}


def _outcome(error: EngineError) -> str:
    """Return the outcome of a call's unfinished requests when it ends with an error."""
    if isinstance(error, RequestRefusedError):
        return "refused"
    return "timed_out" if isinstance(error, GenerationTimeout) else "failed"
