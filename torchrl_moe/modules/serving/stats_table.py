"""Stats as tables: one row per replica, with counts that continue across its restarts."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence

from torchrl_moe.modules.backends.reports import ReplicaStats
from torchrl_moe.modules.serving.candidates import TableEntry
from torchrl_moe.modules.serving.metrics_table import ENGINE_COUNTERS, breaker_state
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.render.tables import html_table

__all__ = ["Totals", "describe", "service_html"]

SHOWN_REPLICAS = 16
SHOWN_ERROR_CHARACTERS = 80


def _state(entry: TableEntry) -> str:
    breaker = breaker_state(entry)
    return entry.state.name if breaker == "closed" else f"{entry.state.name}, breaker {breaker}"


class Totals:
    """Counts of replicas since the service started: an engine's own counts restart at zero with it.

    Read from the stats that replicas send by themselves; no engine is asked.

    Args:
        table: the replicas.
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
    """Return one line on a replica, from the stats that it sent by itself."""
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
    done = [totals.of(entry) for entry in entries]
    alive = [entry.replica.last_stats if entry.state is not ReplicaState.DEAD else None for entry in entries]
    known = [stats or ReplicaStats() for stats in alive]
    rows = [
        _cells(entry, stats, int(counts["requests"]))
        for entry, stats, counts in zip(entries[:SHOWN_REPLICAS], alive, done, strict=False)
    ]
    queries = sum(stats.cache_queries for stats in known)
    usages = [stats.cache_usage for stats in alive if stats is not None]
    footer = [
        "all",
        f"{sum(entry.state is ReplicaState.SERVING for entry in entries)} of {len(entries)} serving",
        _span([entry.version for entry in entries]),
        f"{sum(entry.inflight for entry in entries)}",
        f"{sum(stats.running for stats in known)}",
        f"{sum(stats.waiting for stats in known)}",
        _share(math.fsum(usages) / len(usages) if usages else 0.0),
        _share(sum(stats.cache_hits for stats in known) / queries if queries else 0.0),
        f"{sum(stats.tokens_per_second for stats in known):,.0f}",
        f"{sum(int(counts['requests']) for counts in done):,}",
        f"{sum(entry.restarts for entry in entries)}",
        "",
    ]
    hidden = len(entries) - len(rows)
    return html_table(title, HEADER, rows, footer, f"and {hidden} more replicas" if hidden else "")


def _cells(entry: TableEntry, stats: ReplicaStats | None, requests: int) -> list[str]:
    engine = ["–"] * 5
    if stats is not None:
        engine = [
            f"{stats.running}",
            f"{stats.waiting}",
            _share(stats.cache_usage),
            _share(stats.hit_rate),
            f"{stats.tokens_per_second:,.0f}",
        ]
    return [
        f"#{entry.index}",
        _state(entry),
        f"{entry.version}",
        f"{entry.inflight}",
        *engine,
        f"{requests:,}",
        f"{entry.restarts}",
        (entry.last_error or "").partition("\n")[0][:SHOWN_ERROR_CHARACTERS],
    ]


def _share(value: float) -> str:
    return f"{value:.0%}"


def _span(versions: Sequence[int]) -> str:
    return f"{min(versions)}" if min(versions) == max(versions) else f"{min(versions)} to {max(versions)}"
