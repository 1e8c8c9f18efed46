"""What a service shows of itself: stats per replica, counts of requests, tables, Prometheus text, logs.

Replicas send their stats by themselves; only :meth:`ObservedPool.stats` asks them anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchrl_moe._errors import EngineError
from torchrl_moe.modules.backends.replica import Replica, ReplicaStats
from torchrl_moe.modules.serving.candidates import TableEntry
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.metrics import Metrics
from torchrl_moe.modules.serving.pool import ReplicaPool
from torchrl_moe.modules.serving.prometheus import ServiceCollector, prometheus_text
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.modules.serving.stats_table import SHOWN_REPLICAS, Totals, describe, replica_row, service_html

__all__ = ["ObservedPool"]

STATS_SECONDS = 5.0
MOST_THREADS = 32


class ObservedPool(ReplicaPool):
    """A pool that can be watched; safe to call from any thread.

    Args:
        replicas: see :class:`ReplicaPool`, as for the next two.
        faults: how faults are treated.
        make_replica: makes a new replica for an index.
        metrics: whether requests are counted.

    Attributes:
        metrics: what became of the requests, and how long they took; ``metrics.summary()`` can be logged as it is.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        faults: FaultPolicy | None = None,
        make_replica: Callable[[int], Replica] | None = None,
        *,
        metrics: bool = True,
    ) -> None:
        super().__init__(replicas, faults, make_replica)
        self.metrics = Metrics(metrics)
        self._totals = Totals(self.replica_table)

    def stats(self, timeout_seconds: float = STATS_SECONDS) -> list[dict[str, Any]]:
        """Return one flat dictionary per replica: state, version, and its engine's stats of this moment.

        All are asked at the same time; one that does not answer shows what it last sent by itself, and a dead one
        shows no stats of an engine. ``supervisor_error`` is ``None`` while
        deaths and stalls are noticed. Counts are since its engine started; see
        :class:`~torchrl_moe.modules.backends.replica.ReplicaStats`.
        """
        self._check_running("stats")
        self._note_deaths()
        with ThreadPoolExecutor(min(self.num_replicas, MOST_THREADS)) as pool:
            stats = pool.map(lambda entry: _ask(entry, timeout_seconds), self.replica_table)
            rows = [replica_row(entry, own) for entry, own in zip(self.replica_table, stats, strict=True)]
        return [{**row, "supervisor_error": self._supervisor.error} for row in rows]

    def to_pandas(self) -> Any:
        """Return :meth:`stats` as a pandas ``DataFrame``."""
        import pandas

        return pandas.DataFrame(self.stats())

    def prometheus(self) -> str:
        """Return the stats of the replicas and of the service in Prometheus' text format; asks no engine anything.

        Raises:
            ImportError: ``prometheus_client`` is not installed; the message names the extra.
        """
        self._check_running("prometheus")
        return prometheus_text(self._collector())

    def register_prometheus(self, registry: Any) -> Any:
        """Have a ``prometheus_client`` registry collect this service; returns the collector, to unregister it by.

        Raises:
            ImportError: ``prometheus_client`` is not installed; the message names the extra.
            ValueError: the registry has a service already; give each one its own.
        """
        self._check_running("register_prometheus")
        collector = self._collector()
        registry.register(collector)
        return collector

    def _collector(self) -> ServiceCollector:
        return ServiceCollector(self.replica_table, self._totals, self.metrics)

    def log_paths(self) -> list[Path | None]:
        """Return where each replica's engine logs on this machine; ``None`` if it is not started, or runs elsewhere."""
        return [entry.replica.log_path for entry in self.replica_table]

    def _title(self) -> str:
        model = self.infos[0].model if self.infos else "not started"
        return f"{type(self).__name__}({model!r}, {self.num_replicas} replica{'s' * (self.num_replicas != 1)})"

    def __repr__(self) -> str:
        entries = list(self.replica_table)
        lines = [self._title(), *(f"  {describe(entry)}" for entry in entries[:SHOWN_REPLICAS])]
        hidden = len(entries) - SHOWN_REPLICAS
        return "\n".join([*lines, *([f"  and {hidden} more"] if hidden > 0 else [])])

    def _repr_html_(self) -> str:
        return service_html(self._title(), list(self.replica_table), self._totals)


def _ask(entry: TableEntry, seconds: float) -> ReplicaStats | None:
    if entry.state is ReplicaState.DEAD:
        return None
    last: ReplicaStats | None = entry.replica.last_stats
    if entry.state is ReplicaState.STARTING:
        return last
    try:
        stats: ReplicaStats = entry.replica.stats(seconds)
    except EngineError:  # busy, or dying: others find that out
        return last
    return stats
