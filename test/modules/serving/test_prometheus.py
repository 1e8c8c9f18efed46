"""Prometheus text, read back by Prometheus' own parser."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from support.services import ask
from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.stats import BOUNDS
from torchrl_moe.testing.fake_engine import FakeReplica


def read(text: str) -> dict[str, Any]:
    """The families by name."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(families: dict[str, Any], name: str) -> dict[tuple[str, ...], float]:
    """The samples of a family: label values -> value."""
    return {tuple(sample.labels.values()): sample.value for sample in families[name].samples}


def test_each_family_has_its_kind_and_a_word_of_help(serve: Callable[..., Any]) -> None:
    families = read(serve(2).prometheus())
    assert all(name.startswith("torchrl_moe_") for name in families)
    assert all(family.documentation.endswith(".") for family in families.values())
    kinds = {name.removeprefix("torchrl_moe_"): family.type for name, family in families.items()}
    assert {name for name, kind in kinds.items() if kind == "histogram"} == {
        "request_queue_seconds",
        "request_first_token_seconds",
        "request_total_seconds",
    }
    for name in ("replica_requests", "replica_restarts", "replica_generation_seconds", "requests", "requests_finished"):
        assert kinds[name] == "counter"
    for name in ("replica_state", "replica_running_sequences", "replica_kv_cache_usage_ratio"):
        assert kinds[name] == "gauge"
    assert set(kinds.values()) == {"counter", "gauge", "histogram"}


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
    ask(engine, ["a", "b"])
    assert values(read(engine.prometheus()), "torchrl_moe_replica_requests") == {("0",): 2}
    ask(engine, "c")
    engine.replica_table[0].replica = FakeReplica()  # as after a restart
    assert values(read(engine.prometheus()), "torchrl_moe_replica_requests") == {("0",): 3}
    ask(engine, "d")
    assert values(read(engine.prometheus()), "torchrl_moe_replica_requests") == {("0",): 4}


def test_the_services_own_counters_and_histograms_are_there(serve: Callable[..., Any]) -> None:
    engine = serve(refuse=lambda request: "no" if request.prompt == "bad" else None)
    ask(engine, ["a", "b"], 5)
    with pytest.raises(ValueError, match="refused"):
        ask(engine, "bad")
    families = read(engine.prometheus())
    assert values(families, "torchrl_moe_requests") == {(): 3}
    assert values(families, "torchrl_moe_generated_tokens") == {(): 10}
    assert values(families, "torchrl_moe_requests_finished") == {
        ("completed",): 2,
        ("aborted",): 0,
        ("timed_out",): 0,
        ("refused",): 1,
        ("failed",): 0,
    }
    samples = {
        (sample.name.removeprefix("torchrl_moe_request_queue_seconds_"), sample.labels.get("le")): sample.value
        for sample in families["torchrl_moe_request_queue_seconds"].samples
    }
    buckets = [value for (kind, _), value in samples.items() if kind == "bucket"]
    assert len(buckets) == len(BOUNDS) + 1
    assert buckets == sorted(buckets)
    assert (samples["bucket", "+Inf"], samples["count", None], samples["sum", None]) == (2, 2, 0)
    assert samples["bucket", "0.001"] == 2


def test_with_metrics_off_the_replicas_remain(serve: Callable[..., Any]) -> None:
    engine = serve(metrics=False)
    ask(engine, "a")
    families = read(engine.prometheus())
    assert all(name.startswith("torchrl_moe_replica_") for name in families)
    assert values(families, "torchrl_moe_replica_requests") == {("0",): 1}


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
