"""The table of metrics: rows of stats, and that no field of an engine's stats is missing."""

from __future__ import annotations

from types import SimpleNamespace

from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.stats import (
    COUNTERS,
    ENGINE_COUNTERS,
    OF_THE_ENGINE,
    OF_THE_TABLE,
    OUTCOMES,
    breaker_state,
    replica_row,
)

STATS = ReplicaStats(running=3, cache_queries=200, cache_hits=50, steps=70)


def table(*stats: ReplicaStats | None) -> ReplicaTable:
    return ReplicaTable([SimpleNamespace(last_stats=one) for one in stats], ReplicaState.SERVING)


def test_a_row_is_flat_and_has_no_engines_part_without_its_stats() -> None:
    entry = table(STATS)[0]
    entry.version, entry.inflight, entry.restarts, entry.last_error = 3, 5, 2, "out of memory"
    known = {
        "replica": 0,
        "state": "SERVING",
        "version": 3,
        "inflight": 5,
        "breaker": "closed",
        "restarts": 2,
        "not_finite_logprobs": 0,
        "last_error": "out of memory",
    }
    assert replica_row(entry, None) == known
    row = replica_row(entry, STATS)
    assert row.items() >= {**known, "running": 3, "steps": 70, "hit_rate": 0.25}.items()
    assert len(row) == 8 + 16 + 1


def test_each_field_of_an_engines_stats_is_a_metric() -> None:
    assert [metric.name for metric in OF_THE_ENGINE] == [*ReplicaStats.__slots__, "hit_rate"]
    assert "running" not in ENGINE_COUNTERS
    assert {"requests", "steps"} < set(ENGINE_COUNTERS)


def test_names_are_used_once_and_what_is_exported_says_what_it_is() -> None:
    metrics = [*OF_THE_TABLE, *OF_THE_ENGINE]
    exported = [metric.exported for metric in metrics if metric.exported]
    assert len({metric.name for metric in metrics}) == len(metrics)
    assert len(set(exported)) == len(exported)
    assert all(metric.meaning.endswith(".") for metric in metrics if metric.exported)
    assert OUTCOMES.keys() < COUNTERS.keys()


def test_the_word_for_a_breaker() -> None:
    (entry,) = table(STATS)
    assert breaker_state(entry) == "closed"
    entry.breaker.failed(trip=True)
    assert breaker_state(entry) == "open"
    (metric,) = [metric for metric in OF_THE_TABLE if metric.name == "breaker"]
    assert (metric.number("closed"), metric.number("half-open")) == (0, 1)
