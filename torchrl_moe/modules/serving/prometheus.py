"""The stats of a service as Prometheus reads them. A scrape reads what is known already and asks no engine.

``prometheus_client`` is an extra, imported on first use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.candidates import TableEntry
from torchrl_moe.modules.serving.metrics import BOUNDS, COUNTERS, OUTCOMES, Metrics
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.modules.serving.stats_table import Totals, breaker_state

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["ServiceCollector", "prometheus_text"]

PREFIX = "torchrl_moe_"
GAUGES: dict[str, tuple[str, Callable[[TableEntry, ReplicaStats], float]]] = {
    "policy_version": ("Version of the weights.", lambda entry, _: entry.version),
    "inflight_requests": ("Requests handed to the replica and not back yet.", lambda entry, _: entry.inflight),
    "running_sequences": ("Answers being generated.", lambda _, stats: stats.running),
    "waiting_sequences": ("Answers in the engine's queue.", lambda _, stats: stats.waiting),
    "kv_cache_usage_ratio": ("Share of KV blocks in use, 0 to 1.", lambda _, stats: stats.cache_usage),
    "tokens_per_second": ("Tokens generated, of the last second.", lambda _, stats: stats.tokens_per_second),
    "breaker_open": ("1 unless the circuit breaker is closed.", lambda entry, _: breaker_state(entry) != "closed"),
    "last_step_timestamp_seconds": ("When the engine last ended a step.", lambda _, stats: stats.step_at),
}
TOTALS = {
    "requests": ("requests", "Requests that the engine ended."),
    "completions": ("sequences", "Answers that the engine ended."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of ended requests."),
    "cached_tokens": ("cached_tokens", "Those of them that the prefix cache had."),
    "generated_tokens": ("generated_tokens", "Tokens of ended requests."),
    "generation_seconds": ("generation_seconds", "Seconds that requests spent in the engine, summed."),
    "cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("preemptions", "Requests that lost their KV blocks and were recomputed."),
    "steps": ("steps", "Steps of the engine."),
}


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

    Counters of replicas go on over restarts. With metrics off, those of the service itself are left out.

    Args:
        table: the replicas.
        totals: their counts.
        metrics: the service's own.
    """

    def __init__(self, table: ReplicaTable, totals: Totals, metrics: Metrics) -> None:
        self._families = _prometheus().core
        self._table = table
        self._totals = totals
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        """Yield the families, as ``prometheus_client`` asks."""
        yield from self._of_replicas()
        if self._metrics.enabled:
            yield from self._of_service()

    def _of_replicas(self) -> Iterator[Any]:
        entries = list(self._table)
        states = self._families.GaugeMetricFamily(
            f"{PREFIX}replica_state", "1 for the state that the replica is in.", labels=["replica", "state"]
        )
        for entry in entries:
            for state in ReplicaState:
                states.add_metric([str(entry.index), state.value], float(entry.state is state))
        yield states
        stats = [_living_stats(entry) for entry in entries]
        for name, (meaning, read) in GAUGES.items():
            gauge = self._families.GaugeMetricFamily(f"{PREFIX}replica_{name}", meaning, labels=["replica"])
            for entry, own in zip(entries, stats, strict=True):
                gauge.add_metric([str(entry.index)], float(read(entry, own)))
            yield gauge
        counts = [{**self._totals.of(entry), "restarts": entry.restarts} for entry in entries]
        for key, (name, meaning) in {**TOTALS, "restarts": ("restarts", "Restarts of the replica.")}.items():
            counter = self._families.CounterMetricFamily(f"{PREFIX}replica_{name}", meaning, labels=["replica"])
            for entry, of_replica in zip(entries, counts, strict=True):
                counter.add_metric([str(entry.index)], of_replica[key])
            yield counter

    def _of_service(self) -> Iterator[Any]:
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
        for name, (counts, total) in self._metrics.histograms().items():
            ends = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
            yield self._families.HistogramMetricFamily(
                f"{PREFIX}request_{name}",
                "Seconds of answered requests, from their arrival at the engine.",
                buckets=list(zip(ends, itertools.accumulate(counts), strict=True)),
                sum_value=total,
            )


def _living_stats(entry: TableEntry) -> ReplicaStats:
    """Return the last stats of a replica that may still be in that condition, else zeros."""
    gone = entry.state in (ReplicaState.DEAD, ReplicaState.STARTING)
    return ReplicaStats() if gone else entry.replica.last_stats or ReplicaStats()


def prometheus_text(collector: ServiceCollector) -> str:
    """Return a collector's families in Prometheus' text format."""
    client = _prometheus()
    registry = client.CollectorRegistry()
    registry.register(collector)
    return str(client.generate_latest(registry).decode())
