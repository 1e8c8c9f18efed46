"""A service in numbers: metrics of requests, the table of all metrics, Prometheus, the table for people."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from torchrl_moe.errors import EngineError, GenerationTimeout, RequestRefusedError
from torchrl_moe.modules.backends.replica import Completion, ReplicaStats
from torchrl_moe.modules.serving.replica_table import BreakerState, ReplicaState, ReplicaTable, TableEntry
from torchrl_moe.render.tables import html_table

if TYPE_CHECKING:
    from types import ModuleType

    from prometheus_client.core import Metric


# Every metric of a service: its name in tables, its name and help in Prometheus, and where it is read.
#
# A replica's metrics are rows of ``stats()``; the service's own are counted by :class:`Metrics`.


@dataclass(frozen=True, slots=True)
class ReplicaMetric:
    name: str
    kind: Literal["counter", "gauge", "label"]
    exported: str = ""
    meaning: str = ""
    attribute: str = ""  # where it is read, if not by its name

    def read(self, source: object) -> Any:
        return attrgetter(self.attribute or self.name)(source)


CLOSED = BreakerState.CLOSED.value
OF_THE_TABLE: tuple[ReplicaMetric, ...] = (
    ReplicaMetric("replica", "label", attribute="index"),
    ReplicaMetric("state", "label", attribute="state.name"),
    ReplicaMetric("version", "gauge", "policy_version", "Version of the weights."),
    ReplicaMetric("inflight", "gauge", "inflight_requests", "Requests sent to the replica that have not ended."),
    ReplicaMetric("breaker", "label", "breaker_open", "1 unless the circuit breaker is closed.", "breaker.state.value"),
    ReplicaMetric("restarts", "counter", "restarts", "Restarts of the replica."),
    ReplicaMetric("not_finite_logprobs", "counter", "not_finite_logprobs",
                  "Log-probs of its answers that were NaN or infinite.", "not_finite"),
    ReplicaMetric("last_error", "label"),
)  # fmt: skip
"""What the service knows of a replica: read from a :class:`TableEntry`."""

OF_THE_ENGINE: tuple[ReplicaMetric, ...] = (
    ReplicaMetric("running", "gauge", "running_sequences", "Answers being generated."),
    ReplicaMetric("waiting", "gauge", "waiting_sequences", "Answers in the engine's queue."),
    ReplicaMetric("cache_usage", "gauge", "kv_cache_usage_ratio", "Share of KV blocks in use, 0 to 1."),
    ReplicaMetric("tokens_per_second", "gauge", "tokens_per_second", "Tokens generated, of the last second."),
    ReplicaMetric("requests", "counter", "requests", "Requests that the engine ended."),
    ReplicaMetric("completions", "counter", "sequences", "Answers that the engine ended."),
    ReplicaMetric("prompt_tokens", "counter", "prompt_tokens", "Prompt tokens of ended requests."),
    ReplicaMetric("cached_tokens", "counter", "cached_tokens", "Those of them found in the prefix cache."),
    ReplicaMetric("generated_tokens", "counter", "generated_tokens", "Tokens of ended requests."),
    ReplicaMetric(
        "generation_seconds", "counter", "generation_seconds", "Seconds that requests spent in the engine, summed."
    ),
    ReplicaMetric("cache_queries", "counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ReplicaMetric("cache_hits", "counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ReplicaMetric("preemptions", "counter", "preemptions", "Requests that lost their KV blocks and were recomputed."),
    ReplicaMetric("steps", "counter", "steps", "Steps of the engine."),
    ReplicaMetric("step_at", "gauge", "last_step_timestamp_seconds", "When the engine last ended a step."),
    ReplicaMetric("weights_version", "gauge", "", ""),
    ReplicaMetric("hit_rate", "gauge", "", ""),
)
"""What an engine reports: read from its :class:`ReplicaStats`."""

ENGINE_COUNTERS = tuple(metric.name for metric in OF_THE_ENGINE if metric.kind == "counter")

OUTCOMES = {
    "completed": "returned whole",
    "aborted": "cut short: by an abort, Ctrl-C, a cancelled task, or an error of another request of the call",
    "timed_out": "not finished at their deadline",
    "refused": "that the engine or the service would not take",
    "failed": "that a replica failed, or that found none to serve them",
}
"""The outcomes of requests: every request ends in one of them."""

COUNTERS = {
    "requests": "Requests given to the service.",
    **{name: f"Requests {meaning}." for name, meaning in OUTCOMES.items()},
    "retried": "Times that a request was started again on another replica.",
    "sequences": "Answers returned.",
    "prompt_tokens": "Prompt tokens of the requests that were answered.",
    "cached_tokens": "Those of them found in a prefix cache.",
    "generated_tokens": "Tokens of the answers.",
    "generation_seconds": "Seconds from a request's arrival at its engine to its last token, summed.",
}
"""What the service counts of its requests."""


def replica_row(entry: TableEntry, stats: ReplicaStats | None) -> dict[str, object]:
    """Return all metrics of a replica as one flat dictionary, without the engine's part if it reported none."""
    row = {metric.name: metric.read(entry) for metric in OF_THE_TABLE}
    return row if stats is None else row | {metric.name: metric.read(stats) for metric in OF_THE_ENGINE}


# Outcomes and durations of a service's requests: counters, percentiles, histograms.
#
# Every request counts once in ``requests`` and once more when its call ends, by its outcome as the caller sees it.


SECONDS = ("queue_seconds", "first_token_seconds", "total_seconds")
BOUNDS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1.0, 2.5, 5.0))
MOST_RECENT = 2048

Finished: TypeAlias = Callable[[Sequence[Completion]], object]


class Histogram:
    """Durations in seconds: counts per bucket since the start, and percentiles of the most recent ones."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0
        self._recent: deque[float] = deque(maxlen=MOST_RECENT)

    def add(self, seconds: float) -> None:
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
        if name not in self._counts:
            raise ValueError(f"no counter {name!r}; known: {', '.join(COUNTERS)}")
        if self.enabled:
            with self._lock:
                self._counts[name] += amount

    @contextlib.contextmanager
    def call(self, requests: int, whole: Sequence[Completion] = ()) -> Iterator[Finished]:
        """Count the requests of one call; the body passes its completions to the yielded function."""
        before = set(map(id, whole))
        self.count("requests", requests)
        try:
            yield partial(self._finish, before=before)
        except EngineError as error:
            done = self._finish([one for one in error.partial if not one.aborted], before)
            if isinstance(error, RequestRefusedError):
                outcome = "refused"
            else:
                outcome = "timed_out" if isinstance(error, GenerationTimeout) else "failed"
            self.count(outcome, requests - done)
            raise
        except ValueError:
            self.count("refused", requests)
            raise
        except BaseException:
            self.count("aborted", requests)
            raise

    def _finish(self, completions: Sequence[Completion], before: Container[int]) -> int:
        """Count completions, without those that were whole ``before``, and return how many."""
        if not self.enabled:
            return 0
        done = 0
        with self._lock:
            for completion in completions:
                if id(completion) in before:
                    continue
                done += 1
                self._counts["aborted" if completion.aborted else "completed"] += 1
                if completion.prompt_logprobs is None:  # else it was scored, and its one token is dropped
                    self._counts["sequences"] += len(completion.outputs)
                    self._counts["generated_tokens"] += sum(len(output.token_ids) for output in completion.outputs)
                self._counts["prompt_tokens"] += len(completion.prompt_token_ids)
                self._counts["cached_tokens"] += completion.num_cached_tokens
                self._counts["generation_seconds"] += completion.metrics.total_seconds
                for name, histogram in self._histograms.items():
                    histogram.add(getattr(completion.metrics, name))
        return done

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


# Stats as tables: one row per replica, with counts that continue across its restarts.


SHOWN_REPLICAS = 16
SHOWN_ERROR_CHARACTERS = 80


def _state(entry: TableEntry) -> str:
    breaker = entry.breaker.state.value
    return entry.state.name if breaker == CLOSED else f"{entry.state.name}, breaker {breaker}"


class Totals:
    """Counts of replicas since the service started: an engine's own counts restart at zero with it.

    Read from the stats that replicas send by themselves; no engine is asked.
    """

    def __init__(self, table: ReplicaTable) -> None:
        self._lock = threading.Lock()
        self._replicas = {entry.index: entry.replica for entry in table}
        self._before: defaultdict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ENGINE_COUNTERS, 0.0))

    def of(self, entry: TableEntry) -> dict[str, float]:
        """Return the counts of one replica, including its earlier engines as far as their stats arrived."""
        with self._lock:
            before = self._before[entry.index]
            if (last := self._replicas.setdefault(entry.index, entry.replica)) is not entry.replica:
                before.update(_add(before, last.last_stats))
                self._replicas[entry.index] = entry.replica
            return _add(before, entry.replica.last_stats)


def _add(counts: dict[str, float], stats: ReplicaStats | None) -> dict[str, float]:
    return {name: value + getattr(stats, name, 0) for name, value in counts.items()}


def describe(entry: TableEntry) -> str:
    stats: ReplicaStats | None = entry.replica.last_stats
    line = f"#{entry.index} {_state(entry)}, v{entry.version}, {entry.inflight} in flight"
    if stats is not None and entry.state is not ReplicaState.DEAD:
        line += (
            f", {stats.running} running, {stats.waiting} queued, KV {stats.cache_usage:.0%}, "
            f"prefix hits {stats.hit_rate:.0%}, {stats.tokens_per_second:.0f} tok/s"
        )
    return line + (f", restarts: {entry.restarts}" if entry.restarts else "")


HEADER = ("replica", "state", "version", "in flight", "running", "queued", "KV use", "prefix hits", "tokens/s",
          "requests", "restarts", "last error")  # fmt: skip


def service_html(title: str, entries: Sequence[TableEntry], totals: Totals) -> str:
    """Return a table of the replicas as HTML: the first 16 of them, and a row for all."""
    done = [int(totals.of(entry)["requests"]) for entry in entries]
    alive = [entry.replica.last_stats if entry.state is not ReplicaState.DEAD else None for entry in entries]
    rows = []
    for entry, stats, requests in zip(entries[:SHOWN_REPLICAS], alive, done, strict=False):
        row = [f"#{entry.index}", _state(entry), f"{entry.version}", f"{entry.inflight}"]
        if stats is None:
            row += ["–"] * 5
        else:
            row += [f"{stats.running}", f"{stats.waiting}", f"{stats.cache_usage:.0%}", f"{stats.hit_rate:.0%}"]
            row += [f"{stats.tokens_per_second:,.0f}"]
        error = (entry.last_error or "").partition("\n")[0][:SHOWN_ERROR_CHARACTERS]
        rows.append([*row, f"{requests:,}", f"{entry.restarts}", error])
    known = [stats or ReplicaStats() for stats in alive]
    versions, queries = [entry.version for entry in entries], sum(stats.cache_queries for stats in known)
    usages = [stats.cache_usage for stats in alive if stats is not None]
    footer = [
        "all",
        f"{sum(entry.state is ReplicaState.SERVING for entry in entries)} of {len(entries)} serving",
        f"{min(versions)}" if len(set(versions)) == 1 else f"{min(versions)} to {max(versions)}",
        f"{sum(entry.inflight for entry in entries)}",
        f"{sum(stats.running for stats in known)}",
        f"{sum(stats.waiting for stats in known)}",
        f"{math.fsum(usages) / max(1, len(usages)):.0%}",
        f"{sum(stats.cache_hits for stats in known) / queries if queries else 0.0:.0%}",
        f"{sum(stats.tokens_per_second for stats in known):,.0f}",
        f"{sum(done):,}",
        f"{sum(entry.restarts for entry in entries)}",
        "",
    ]
    hidden = len(entries) - len(rows)
    return html_table(title, HEADER, rows, footer, f"and {hidden} more replicas" if hidden else "")


# The stats of a service as Prometheus reads them. A scrape reads what is known already and asks no engine.
#
# ``prometheus_client`` is an extra, imported on first use.


PREFIX = "torchrl_moe_"


def _prometheus() -> ModuleType:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise ImportError(
            "Prometheus text needs prometheus_client, an extra: pip install torchrl_moe[prometheus]"
        ) from error
    return prometheus_client


class ServiceCollector:
    """Gives a Prometheus registry the families of one service.

    Counters of replicas continue over restarts. With metrics off, those of the service itself are left out.
    """

    def __init__(self, table: ReplicaTable, totals: Totals, metrics: Metrics) -> None:
        self._families = _prometheus().core
        self._table = table
        self._totals = totals
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._of_replicas()
        if self._metrics.enabled:
            yield from self._of_service()

    def _of_replicas(self) -> Iterator[Metric]:
        entries = list(self._table)
        states = self._families.GaugeMetricFamily(
            f"{PREFIX}replica_state", "1 for the state that the replica is in.", labels=["replica", "state"]
        )
        for entry in entries:
            for state in ReplicaState:
                states.add_metric([str(entry.index), state.value], float(entry.state is state))
        yield states
        # the last stats of a replica that may still be in that condition, else zeros
        gone = (ReplicaState.DEAD, ReplicaState.STARTING)
        stats = [(None if entry.state in gone else entry.replica.last_stats) or ReplicaStats() for entry in entries]
        totals = [self._totals.of(entry) for entry in entries]
        for metrics, sources in ((OF_THE_TABLE, entries), (OF_THE_ENGINE, stats)):
            for metric in metrics:
                if not metric.exported:
                    continue
                counts = metric.kind == "counter"
                family = self._families.CounterMetricFamily if counts else self._families.GaugeMetricFamily
                one = family(f"{PREFIX}replica_{metric.exported}", metric.meaning, labels=["replica"])
                for entry, source, total in zip(entries, sources, totals, strict=True):
                    value = total.get(metric.name) if counts else None
                    if value is None:
                        value = metric.read(source)
                    if metric.name == "breaker":
                        value = value != CLOSED
                    one.add_metric([str(entry.index)], float(value))
                yield one

    def _of_service(self) -> Iterator[Metric]:
        summary = self._metrics.summary()
        finished = self._families.CounterMetricFamily(
            f"{PREFIX}requests_finished", "Requests that are over, by what became of them.", labels=["outcome"]
        )
        for outcome in OUTCOMES:
            finished.add_metric([outcome], summary[outcome])
        yield finished
        for name, meaning in COUNTERS.items():
            if name not in OUTCOMES:
                yield self._families.CounterMetricFamily(f"{PREFIX}{name}", meaning, value=summary[name])
        ends = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
        for name, (counts, total) in self._metrics.histograms().items():
            yield self._families.HistogramMetricFamily(
                f"{PREFIX}request_{name}",
                "Seconds of answered requests, from their arrival at the engine.",
                buckets=list(zip(ends, itertools.accumulate(counts), strict=True)),
                sum_value=total,
            )


def prometheus_text(collector: ServiceCollector) -> str:
    client = _prometheus()
    registry = client.CollectorRegistry()
    registry.register(collector)
    return str(client.generate_latest(registry).decode())
