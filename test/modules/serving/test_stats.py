"""What a service shows: stats of replicas, what became of requests, tables, text, Prometheus, logs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from support.html_table import TableReader
from support.services import ask, slow_if, until_running, waiting_request
from support.waiting import in_thread
from torchrl_moe.errors import EngineError, GenerationTimeout, NoReplicaError
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, ReplicaStats, nothing_yet
from torchrl_moe.modules.serving.replica_table import ReplicaState, ReplicaTable
from torchrl_moe.modules.serving.stats import (
    BOUNDS,
    COUNTERS,
    MOST_RECENT,
    OUTCOMES,
    Histogram,
    Metrics,
    Totals,
    describe,
    service_html,
)
from torchrl_moe.testing.fake_engine import FakeReplica


def test_stats_are_flat_and_true(serve: Callable[..., Any]) -> None:
    engine = serve(2)
    engine.replica_table.set_version(1, 3)
    engine.generate([[1, 2], [3], [4]], {"max_tokens": 5, "n": 2}, use_tqdm=False)
    engine.replicas[1].die()
    of_the_table = {
        "replica": 0,
        "state": "SERVING",
        "version": 0,
        "inflight": 0,
        "breaker": "closed",
        "restarts": 0,
        "not_finite_logprobs": 0,
        "last_error": None,
        "supervisor_error": None,
    }
    done = {"requests": 2, "completions": 4, "prompt_tokens": 3, "generated_tokens": 20}
    dead = {"replica": 1, "state": "DEAD", "version": 3, "last_error": "replica 1 died: injected death"}
    nothing = dict.fromkeys((*ReplicaStats.__slots__, "hit_rate"), 0)
    assert engine.stats() == [{**of_the_table, **nothing, **done}, {**of_the_table, **dead}]


def test_one_that_does_not_answer_shows_what_it_last_sent(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fails = serve(3), Future[ReplicaStats]()
    fails.set_exception(EngineError("busy"))
    engine.replicas[1].overrides["stats"] = lambda timeout: fails.result()
    engine.replica_table.mark_dead(2)
    engine.replica_table.set_state(2, ReplicaState.STARTING)
    engine.replicas[2].overrides["stats"] = lambda timeout: pytest.fail("it is starting: asked too early")
    monkeypatch.setattr(FakeReplica, "last_stats", ReplicaStats(requests=5))
    assert [row["requests"] for row in engine.stats()] == [5, 5, 5]
    monkeypatch.setattr(FakeReplica, "last_stats", None)
    assert "requests" not in engine.stats()[1]


def test_a_service_prints_a_line_per_replica_and_asks_none(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(2)
    monkeypatch.setattr(FakeReplica, "call", lambda *_: pytest.fail("asked"))
    with engine.load_balancer.acquire_at(0):
        line = "SERVING, v0, {} in flight, 0 running, 0 queued, KV 0%, prefix hits 0%, 0 tok/s"
        lines = [f"  #{index} {line.format(1 - index)}" for index in range(2)]
        assert repr(engine).splitlines() == ["FakeAsyncVLLM('fake', 2 replicas)", *lines]
    html = engine._repr_html_()
    assert "FakeAsyncVLLM(&#x27;fake&#x27;, 2 replicas)" in html
    assert html.count("<tr") == 4  # header, two replicas, all


def test_log_paths_are_the_replicas_own(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve(2)
    paths = {1: Path("/logs/replica-1.log")}
    monkeypatch.setattr(FakeReplica, "log_path", property(lambda replica: paths.get(replica.index)))
    assert engine.log_paths() == [None, Path("/logs/replica-1.log")]
    engine.shutdown()
    assert engine.log_paths()[1] == Path("/logs/replica-1.log")  # to be read afterwards


STATS = ReplicaStats(
    running=3, waiting=2, cache_usage=0.25, tokens_per_second=1234.4, requests=10, cache_queries=200, cache_hits=50
)


def table(*stats: ReplicaStats | None) -> ReplicaTable:
    return ReplicaTable([SimpleNamespace(last_stats=one) for one in stats], ReplicaState.SERVING)


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


def test_the_table_has_a_row_for_each_replica_and_one_for_all() -> None:
    entries = table(STATS, ReplicaStats(running=1, requests=5, cache_queries=100, cache_hits=100), STATS, None)
    entries.set_version(1, 4)
    entries.mark_dead(2)
    entries[2].restarts, entries[2].last_error = 1, "exit code -9 " + "x" * 100 + "\nand many words"
    read = TableReader(service_html("t", list(entries), Totals(entries)))
    one, two, three, four, total = [*read.rows["tbody"], *read.rows["tfoot"]]
    assert one == ["#0", "SERVING", "0", "0", "3", "2", "25%", "25%", "1,234", "10", "0", ""]
    assert two[2:9] == ["4", "0", "1", "0", "0%", "100%", "0"]
    assert three == ["#2", "DEAD", "0", "0", *"–––––", "10", "1", "exit code -9 " + "x" * 67]
    assert four[4:] == [*"–––––", "0", "0", ""]
    # 50 + 100 of 200 + 100 tokens were found; 25 % and 0 % are in use; the dead one's requests were done all the same
    assert total == ["all", "3 of 4 serving", "0 to 4", "0", "4", "2", "12%", "50%", "1,234", "25", "1", ""]


def completion(tokens: int) -> Completion:
    ids = np.zeros(tokens, np.int64)
    output = CompletionOutput(
        index=0, token_ids=ids, text="", finish_reason="stop", policy_versions=ids.astype(np.int32)
    )
    return Completion(request_id="r", prompt=None, prompt_token_ids=ids, num_cached_tokens=1, outputs=[output])


def counted(metrics: Metrics) -> dict[str, float]:
    """The counters that are not 0."""
    return {name: value for name, value in metrics.summary().items() if name in COUNTERS and value}


@pytest.mark.parametrize(
    ("error", "counter"),
    [
        (ValueError("request ids are in flight"), "refused"),
        (EngineError("died"), "failed"),
        (KeyboardInterrupt(), "aborted"),
        (asyncio.CancelledError(), "aborted"),
    ],
)
def test_a_call_that_fails_counts_its_requests_by_the_reason_and_passes_it_on(
    error: BaseException, counter: str
) -> None:
    metrics = Metrics()
    with pytest.raises(type(error)) as caught, metrics.call(3):
        raise error
    assert caught.value is error
    assert counted(metrics) == {"requests": 3, counter: 3}


def test_what_a_call_brings_back_as_it_was_is_not_counted_again() -> None:
    metrics, old = Metrics(), completion(9)
    with metrics.call(1, [old]) as finished:
        finished([old, completion(2)])
    with pytest.raises(GenerationTimeout), metrics.call(1, [old]):
        raise GenerationTimeout("late", [old, nothing_yet(waiting_request().request)])
    counts = counted(metrics)
    assert (counts["requests"], counts["completed"], counts["timed_out"]) == (2, 1, 1)
    assert counts["generated_tokens"] == 2


def test_values_fall_in_the_bucket_that_ends_at_or_above_them() -> None:
    histogram = Histogram()
    for seconds in (0.0, 0.001, 0.0010001, 0.3, 500.0, 501.0):
        histogram.add(seconds)
    found = {bound: count for bound, count in zip((*BOUNDS, float("inf")), histogram.counts, strict=True) if count}
    assert found == {0.001: 2, 0.0025: 1, 0.5: 1, 500.0: 1, float("inf"): 1}
    assert histogram.total == pytest.approx(1001.3020001)


def test_percentiles_are_those_of_the_most_recent_values() -> None:
    histogram = Histogram()
    assert histogram.percentiles() == {}
    for seconds in [1000.0] * 100 + list(range(MOST_RECENT)):  # the first are pushed out
        histogram.add(seconds)
    last = MOST_RECENT - 1
    assert histogram.percentiles() == pytest.approx({"p50": last * 0.5, "p90": last * 0.9, "p99": last * 0.99})


def test_a_service_counts_each_request_once_whatever_becomes_of_it(serve: Callable[..., Any]) -> None:
    engine = serve(
        token_seconds=slow_if("slow", "cut"), refuse=lambda request: "no" if request.prompt == "bad" else None
    )
    ask(engine, ["a", "b"])
    asyncio.run(engine.agenerate("c", {"max_tokens": 2, "n": 3}))
    with pytest.raises(GenerationTimeout):
        ask(engine, ["a", "slow"], timeout_seconds=0.05)
    with pytest.raises(GenerationTimeout):
        asyncio.run(engine.agenerate("slow", timeout_seconds=0.05))
    with pytest.raises(ValueError, match="refused"):
        ask(engine, ["bad", "a"])
    with pytest.raises(ValueError, match="timeout_seconds must be a number above 0"):  # before anything is sent
        ask(engine, timeout_seconds=-1)
    call = in_thread(lambda: ask(engine, "cut", request_ids="mine"))
    until_running(engine, [1])
    engine.abort("mine")
    assert call.result(60.0).aborted
    for entry in engine.replica_table:
        engine.replica_table.set_state(entry.index, ReplicaState.QUARANTINED)
    with pytest.raises(NoReplicaError):
        ask(engine, ["a", "b"])
    counts = counted(engine.metrics)
    expected = {"requests": 11, "completed": 5, "aborted": 1, "timed_out": 2, "refused": 1, "failed": 2}
    assert {name: counts[name] for name in ("requests", *OUTCOMES)} == expected
    # two, the three of one request, two that had finished as their calls failed, and the cut one
    assert counts["sequences"] == 2 + 3 + 2 + 1
    silent = serve(metrics=False)
    ask(silent)
    assert silent.metrics.summary() == {}


# -- Prometheus text, read back by its own parser ----------------------------------------------------------------------


def read(text: str) -> dict[str, Any]:
    """The families by name."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(families: dict[str, Any], name: str) -> dict[tuple[str, ...], float]:
    """The samples of a family: label values -> value."""
    return {tuple(sample.labels.values()): sample.value for sample in families[name].samples}


def test_replicas_are_distinguished_by_a_label(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve(2)
    sent = {
        0: ReplicaStats(running=3, cache_usage=0.5, requests=7, generation_seconds=1.5),
        1: ReplicaStats(waiting=2, cache_hits=9, tokens_per_second=12.5),
    }
    monkeypatch.setattr(FakeReplica, "last_stats", property(lambda replica: sent[replica.index]))
    monkeypatch.setattr(FakeReplica, "call", lambda *_: pytest.fail("a scrape asks no engine"))
    engine.replica_table.set_version(1, 4)
    engine.replica_table[1].restarts = 2
    families = read(engine.prometheus())
    for name, expected in {
        "running_sequences": (3, 0),
        "waiting_sequences": (0, 2),
        "kv_cache_usage_ratio": (0.5, 0),
        "tokens_per_second": (0, 12.5),
        "policy_version": (0, 4),
        "requests": (7, 0),
        "generation_seconds": (1.5, 0),
        "prefix_cache_hits": (0, 9),
        "restarts": (0, 2),
    }.items():
        assert values(families, f"torchrl_moe_replica_{name}") == {("0",): expected[0], ("1",): expected[1]}, name


def test_a_replica_is_in_one_state_and_a_dead_one_has_no_load(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(2)
    monkeypatch.setattr(FakeReplica, "last_stats", ReplicaStats(running=3, requests=7))
    engine.replica_table.mark_dead(0)
    families = read(engine.prometheus())
    states = values(families, "torchrl_moe_replica_state")
    assert len(states) == 2 * len(ReplicaState)
    assert {labels for labels, value in states.items() if value} == {("0", "dead"), ("1", "serving")}
    assert values(families, "torchrl_moe_replica_running_sequences") == {("0",): 0, ("1",): 3}
    assert values(families, "torchrl_moe_replica_requests") == {("0",): 7, ("1",): 7}


def test_a_counter_does_not_fall_when_a_replica_restarts(serve: Callable[..., Any]) -> None:
    engine = serve()
    for prompts, total in ((["a", "b"], 2), (["c"], 3), (["d"], 4)):
        ask(engine, prompts)
        assert values(read(engine.prometheus()), "torchrl_moe_replica_requests") == {("0",): total}
        engine.replica_table[0].replica = FakeReplica()  # as after a restart


def test_the_services_own_counters_and_histograms_are_there(serve: Callable[..., Any]) -> None:
    engine = serve(refuse=lambda request: "no" if request.prompt == "bad" else None)
    ask(engine, ["a", "b"], 5)
    with pytest.raises(ValueError, match="refused"):
        ask(engine, "bad")
    families = read(engine.prometheus())
    assert values(families, "torchrl_moe_requests") == {(): 3}
    assert values(families, "torchrl_moe_generated_tokens") == {(): 10}
    outcomes = {("completed",): 2, ("aborted",): 0, ("timed_out",): 0, ("refused",): 1, ("failed",): 0}
    assert values(families, "torchrl_moe_requests_finished") == outcomes
    queued = "torchrl_moe_request_queue_seconds"
    samples = {
        (sample.name.removeprefix(queued), sample.labels.get("le")): sample.value for sample in families[queued].samples
    }
    buckets = [value for (kind, _), value in samples.items() if kind == "_bucket"]
    assert len(buckets) == len(BOUNDS) + 1
    assert buckets == sorted(buckets)
    assert (samples["_bucket", "0.001"], samples["_bucket", "+Inf"]) == (2, 2)
    assert (samples["_count", None], samples["_sum", None]) == (2, 0)


def test_a_registry_collects_the_service_until_it_is_unregistered(serve: Callable[..., Any]) -> None:
    engine, registry = serve(), CollectorRegistry(auto_describe=True)
    collector = engine.register_prometheus(registry)
    ask(engine, "a")
    assert registry.get_sample_value("torchrl_moe_requests_total") == 1
    assert generate_latest(registry).decode() == engine.prometheus()
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        serve().register_prometheus(registry)
    engine.shutdown()  # a scrape after that fails nobody
    assert registry.get_sample_value("torchrl_moe_replica_state", {"replica": "0", "state": "dead"}) == 1
    registry.unregister(collector)
    assert list(registry.collect()) == []


def test_without_the_client_the_extra_is_named(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for call in (engine.prometheus, lambda: engine.register_prometheus(object())):
        with pytest.raises(ImportError, match=r"pip install torchrl_moe\[prometheus\]"):
            call()
