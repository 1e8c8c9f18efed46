"""The stats of a service as Prometheus reads them. A scrape reads what is known already and asks no engine.

``prometheus_client`` is an extra, imported on first use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchrl_moe.modules.backends.reports import ReplicaStats
from torchrl_moe.modules.serving.candidates import TableEntry
from torchrl_moe.modules.serving.metrics import BOUNDS, Metrics
from torchrl_moe.modules.serving.metrics_table import COUNTERS, OF_THE_ENGINE, OF_THE_TABLE, OUTCOMES
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.modules.serving.stats_table import Totals

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["ServiceCollector", "prometheus_text"]

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
                    one.add_metric([str(entry.index)], metric.number(metric.read(source)) if value is None else value)
                yield one

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
