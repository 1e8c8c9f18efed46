"""Replicas in stats: rows, one-line descriptions, tables, and counts that outlive a restart."""

from __future__ import annotations

from types import SimpleNamespace

from support.html_table import TableReader
from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.stats import (
    SHOWN_REPLICAS,
    Totals,
    describe,
    service_html,
)

STATS = ReplicaStats(
    running=3,
    waiting=2,
    cache_usage=0.25,
    tokens_per_second=1234.4,
    requests=10,
    completions=20,
    prompt_tokens=100,
    cached_tokens=40,
    generated_tokens=500,
    generation_seconds=2.5,
    cache_queries=200,
    cache_hits=50,
    preemptions=1,
    steps=70,
    step_at=1e9,
)


def replica(stats: ReplicaStats | None = None) -> SimpleNamespace:
    return SimpleNamespace(last_stats=stats)


def table(*stats: ReplicaStats | None) -> ReplicaTable:
    return ReplicaTable([replica(one) for one in stats], ReplicaState.SERVING)


def test_the_hit_rate_is_hits_over_tokens_looked_up() -> None:
    assert STATS.hit_rate == 0.25
    assert ReplicaStats().hit_rate == 0.0


def test_a_breaker_that_is_not_closed_shows() -> None:
    breaker = SimpleNamespace(state=SimpleNamespace(value="half-open"))
    entry = SimpleNamespace(
        index=0, replica=replica(), state=ReplicaState.SERVING, version=0, inflight=0, restarts=0, breaker=breaker
    )
    assert describe(entry) == "#0 SERVING, breaker half-open, v0, 0 in flight"


def test_a_line_says_how_a_replica_is() -> None:
    entries = table(STATS, None, STATS)
    entries[0].version = 2
    entries.reserve(0)
    assert describe(entries[0]) == (
        "#0 SERVING, v2, 1 in flight, 3 running, 2 queued, KV 25%, prefix hits 25%, 1234 tok/s"
    )
    entries[1].restarts = 1
    assert describe(entries[1]) == "#1 SERVING, v0, 0 in flight, restarts: 1"
    entries.mark_dead(2)  # its last stats hold no longer
    assert describe(entries[2]) == "#2 DEAD, v0, 0 in flight"


# -- counts over restarts ---------------------------------------------------------------------------------------------


def test_counts_continue_when_a_replica_is_replaced() -> None:
    entries = table(STATS, None)
    totals = Totals(entries)
    assert (totals.of(entries[0])["requests"], totals.of(entries[1])["requests"]) == (10, 0)
    entries[0].replica.last_stats = ReplicaStats(requests=12, cache_hits=60)
    entries[0].replica = replica()  # a new life, of which nothing is known yet
    assert (totals.of(entries[0])["requests"], totals.of(entries[0])["cache_hits"]) == (12, 60)
    entries[0].replica.last_stats = ReplicaStats(requests=1)
    entries[1].replica.last_stats = ReplicaStats(requests=4)
    assert (totals.of(entries[0])["requests"], totals.of(entries[0])["cache_hits"]) == (13, 60)
    entries[0].replica = replica(ReplicaStats(requests=2))
    assert totals.of(entries[0])["requests"] == 15
    assert totals.of(entries[1])["requests"] == 4


# -- as HTML ----------------------------------------------------------------------------------------------------------


def cells(html: str) -> list[list[str]]:
    read = TableReader(html)
    return [*read.rows["tbody"], *read.rows["tfoot"]]


def test_the_table_has_a_row_for_each_replica_and_one_for_all() -> None:
    entries = table(STATS, ReplicaStats(running=1, requests=5, cache_queries=100, cache_hits=100), STATS, None)
    entries.set_version(1, 4)
    entries.mark_dead(2)
    entries[2].restarts, entries[2].last_error = 1, "exit code -9 " + "x" * 100 + "\nand many words"
    one, two, three, four, total = cells(service_html("t", list(entries), Totals(entries)))
    assert one == ["#0", "SERVING", "0", "0", "3", "2", "25%", "25%", "1,234", "10", "0", ""]
    assert two[2:9] == ["4", "0", "1", "0", "0%", "100%", "0"]
    assert three == ["#2", "DEAD", "0", "0", *"–––––", "10", "1", "exit code -9 " + "x" * 67]
    assert four[4:] == [*"–––––", "0", "0", ""]
    # 50 + 100 of 200 + 100 tokens were found; 25 % and 0 % are in use; the dead one's requests were done all the same
    assert total == ["all", "3 of 4 serving", "0 to 4", "0", "4", "2", "12%", "50%", "1,234", "25", "1", ""]


def test_a_large_fleet_is_not_shown_whole_but_counted_whole() -> None:
    entries = table(*[STATS] * (SHOWN_REPLICAS + 3))
    html = service_html("t", list(entries), Totals(entries))
    rows = cells(html)
    assert len(rows) == SHOWN_REPLICAS + 1
    assert rows[-1][1] == f"{SHOWN_REPLICAS + 3} of {SHOWN_REPLICAS + 3} serving"
    assert "and 3 more replicas" in html
