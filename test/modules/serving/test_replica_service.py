"""What a service shows: stats of this moment or as they were sent, tables, text, logs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.services import HOUR, ask, until_running
from support.waiting import in_thread
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.testing.fake_engine import FakeReplica


def test_stats_are_flat_and_true(serve: Callable[..., Any]) -> None:
    engine = serve(2)
    engine.replica_table.set_version(1, 3)
    engine.generate([[1, 2], [3], [4]], {"max_tokens": 5, "n": 2}, use_tqdm=False)
    engine.replicas[1].die()
    first, second = engine.stats()
    assert first == {
        "replica": 0,
        "state": "SERVING",
        "version": 0,
        "inflight": 0,
        "breaker": "closed",
        "restarts": 0,
        "not_finite_logprobs": 0,
        "last_error": None,
        "supervisor_error": None,
        "running": 0,
        "waiting": 0,
        "cache_usage": 0.0,
        "tokens_per_second": 0.0,
        "requests": 2,
        "completions": 4,
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "generated_tokens": 20,
        "generation_seconds": 0.0,
        "cache_queries": 0,
        "cache_hits": 0,
        "preemptions": 0,
        "steps": 0,
        "step_at": 0.0,
        "weights_version": 0,
        "hit_rate": 0.0,
    }
    assert second == {
        "replica": 1,
        "state": "DEAD",
        "version": 3,
        "inflight": 0,
        "breaker": "closed",
        "restarts": 0,
        "not_finite_logprobs": 0,
        "last_error": "replica 1 died: injected death",
        "supervisor_error": None,
    }


def test_stats_come_as_a_table_too(serve: Callable[..., Any]) -> None:
    engine = serve(3)
    ask(engine, list("abcd"))
    table = engine.to_pandas()
    assert table["replica"].tolist() == [0, 1, 2]
    assert table["requests"].tolist() == [2, 1, 1]


def test_replicas_are_asked_at_the_same_time_with_the_callers_deadline(serve: Callable[..., Any]) -> None:
    engine = serve(3)
    together = threading.Barrier(3, timeout=60.0)
    deadlines = []

    def stats(timeout: float) -> ReplicaStats:
        together.wait()
        deadlines.append(timeout)
        return ReplicaStats(running=1)

    for replica in engine.replicas:
        replica.overrides["stats"] = stats
    assert [row["running"] for row in engine.stats(7.5)] == [1, 1, 1]
    assert deadlines == [7.5] * 3


def test_one_that_does_not_answer_shows_what_it_last_sent(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(3)

    def fail(timeout: float) -> ReplicaStats:
        raise EngineError("busy")

    engine.replicas[1].overrides["stats"] = fail
    engine.replica_table.mark_dead(2)
    engine.replica_table.set_state(2, ReplicaState.STARTING)
    engine.replicas[2].overrides["stats"] = lambda timeout: pytest.fail("it is starting: asked too early")
    monkeypatch.setattr(FakeReplica, "last_stats", ReplicaStats(requests=5))
    assert [row["requests"] for row in engine.stats()] == [5, 5, 5]
    monkeypatch.setattr(FakeReplica, "last_stats", None)
    assert "requests" not in engine.stats()[1]


def test_a_service_prints_a_line_per_replica_and_asks_none(serve: Callable[..., Any]) -> None:
    engine = serve(2, token_seconds=HOUR)
    call = in_thread(lambda: ask(engine, request_ids="mine"))
    until_running(engine, [1, 0])
    for replica in engine.replicas:
        replica.overrides["stats"] = lambda timeout: pytest.fail("asked")
    assert repr(engine).splitlines() == [
        "FakeAsyncVLLM('fake', 2 replicas)",
        "  #0 SERVING, v0, 1 in flight, 1 running, 0 queued, KV 0%, prefix hits 0%, 0 tok/s",
        "  #1 SERVING, v0, 0 in flight, 0 running, 0 queued, KV 0%, prefix hits 0%, 0 tok/s",
    ]
    html = engine._repr_html_()
    assert "FakeAsyncVLLM(&#x27;fake&#x27;, 2 replicas)" in html
    assert html.count("<tr") == 4  # header, two replicas, all
    engine.abort("mine")
    call.result(60.0)


def test_a_service_prints_itself_before_its_start_and_after_its_end(serve: Callable[..., Any]) -> None:
    new = GenerationService([FakeReplica()])
    assert repr(new).startswith("GenerationService('not started', 1 replica)\n  #0 STARTING, v0")
    assert "0 of 1 serving" in new._repr_html_()
    engine = serve()
    engine.shutdown()
    assert repr(engine).splitlines()[1] == "  #0 DEAD, v0, 0 in flight"
    assert "0 of 1 serving" in engine._repr_html_()


def test_a_large_service_does_not_print_every_replica(serve: Callable[..., Any]) -> None:
    lines = repr(serve(20)).splitlines()
    assert len(lines) == 1 + 16 + 1
    assert lines[-1] == "  and 4 more"


def test_log_paths_are_the_replicas_own(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve(2)
    paths = {1: Path("/logs/replica-1.log")}
    monkeypatch.setattr(FakeReplica, "log_path", property(lambda replica: paths.get(replica.index)))
    assert engine.log_paths() == [None, Path("/logs/replica-1.log")]
    engine.shutdown()
    assert engine.log_paths()[1] == Path("/logs/replica-1.log")  # to be read afterwards


def test_each_replica_is_seeded_differently(serve: Callable[..., Any]) -> None:
    engine = serve(num_replicas=3)
    assert engine.set_seed(10) == 13
    assert [replica.seed for replica in engine.replicas] == [10, 11, 12]
