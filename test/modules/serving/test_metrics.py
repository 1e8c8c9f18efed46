"""What became of requests: every one counted once, by its outcome; percentiles; and a switch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.requests import waiting_request
from support.services import ask, slow_if, until_running
from support.waiting import in_thread
from torchrl_moe.errors import (
    EngineError,
    GenerationTimeout,
    NoReplicaError,
    ReplicaDiedError,
    RequestRefusedError,
)
from torchrl_moe.modules.backends.replica import Completion, CompletionMetrics, CompletionOutput
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.stats import BOUNDS, COUNTERS, MOST_RECENT, OUTCOMES, Histogram, Metrics
from torchrl_moe.testing.fake_engine import FakeReplica


def completion(prompt: int = 3, tokens: tuple[int, ...] = (2,), reason: str = "stop", **seconds: float) -> Completion:
    outputs = [
        CompletionOutput(
            index=index,
            token_ids=np.zeros(count, np.int64),
            text="",
            finish_reason=reason,
            policy_versions=np.zeros(count, np.int32),
        )
        for index, count in enumerate(tokens)
    ]
    return Completion(
        request_id="r",
        prompt=None,
        prompt_token_ids=np.zeros(prompt, np.int64),
        num_cached_tokens=1,
        outputs=outputs,
        metrics=CompletionMetrics(**seconds),
    )


def counted(metrics: Metrics) -> dict[str, float]:
    """The counters that are not 0."""
    return {name: value for name, value in metrics.summary().items() if name in COUNTERS and value}


# -- counters ---------------------------------------------------------------------------------------------------------


def test_what_finished_is_counted_with_its_tokens_and_seconds() -> None:
    metrics = Metrics()
    with metrics.call(2) as finished:
        finished([completion(3, (2, 4), total_seconds=1.5), completion(5, (7,), "abort", total_seconds=0.25)])
    assert counted(metrics) == {
        "requests": 2,
        "completed": 1,
        "aborted": 1,
        "sequences": 3,
        "prompt_tokens": 8,
        "cached_tokens": 2,
        "generated_tokens": 13,
        "generation_seconds": 1.75,
    }


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("request ids are in flight"), {"refused": 3}),
        (RequestRefusedError("request 1 was refused"), {"refused": 3}),
        (EngineError("died"), {"failed": 3}),
        (NoReplicaError("none"), {"failed": 3}),
        (KeyboardInterrupt(), {"aborted": 3}),
        (asyncio.CancelledError(), {"aborted": 3}),
    ],
    ids=repr,
)
def test_a_call_that_fails_counts_its_requests_by_the_reason_and_passes_it_on(
    error: BaseException, expected: dict[str, int]
) -> None:
    metrics = Metrics()
    with pytest.raises(type(error)) as caught, metrics.call(3):
        raise error
    assert caught.value is error
    assert counted(metrics) == {"requests": 3, **expected}


@pytest.mark.parametrize(
    ("error", "outcome"), [(GenerationTimeout, "timed_out"), (NoReplicaError, "failed"), (ReplicaDiedError, "failed")]
)
def test_of_a_call_that_fails_what_had_finished_counts_as_that(error: type[EngineError], outcome: str) -> None:
    metrics = Metrics()
    with pytest.raises(error), metrics.call(3):
        raise error("late", [waiting_request().cut_short(), completion(), waiting_request().cut_short()])
    counts = counted(metrics)
    assert (counts["completed"], counts[outcome], counts["sequences"]) == (1, 2, 1)


def test_what_a_call_brings_back_as_it_was_is_not_counted_again() -> None:
    metrics, old = Metrics(), completion(tokens=(9,))
    with metrics.call(1, [old]) as finished:
        finished([old, completion(tokens=(2,))])
    with pytest.raises(GenerationTimeout), metrics.call(1, [old]):
        raise GenerationTimeout("late", [old, waiting_request().cut_short()])
    counts = counted(metrics)
    assert (counts["requests"], counts["completed"], counts["timed_out"]) == (2, 1, 1)
    assert counts["generated_tokens"] == 2


def test_a_counter_may_be_moved_by_hand_if_it_exists() -> None:
    metrics = Metrics()
    metrics.count("retried", 2)
    metrics.count("retried")
    assert counted(metrics) == {"retried": 3}
    with pytest.raises(ValueError, match="no counter 'rertied'; known: requests, completed"):
        metrics.count("rertied")


def test_metrics_that_are_off_count_nothing() -> None:
    metrics = Metrics(enabled=False)
    with metrics.call(2) as finished:
        finished([completion()])
    metrics.count("retried")
    assert metrics.summary() == {}
    assert set(metrics._counts.values()) == {0}
    assert metrics.histograms()["total_seconds"] == ([0] * (len(BOUNDS) + 1), 0.0)


# -- seconds ----------------------------------------------------------------------------------------------------------


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
    for _ in range(100):
        histogram.add(1000.0)  # pushed out below
    for index in range(MOST_RECENT):
        histogram.add(float(index))
    last = MOST_RECENT - 1
    assert histogram.percentiles() == pytest.approx({"p50": last * 0.5, "p90": last * 0.9, "p99": last * 0.99})


def test_a_summary_has_the_percentiles_of_each_kind_of_seconds() -> None:
    metrics = Metrics()
    with metrics.call(1) as finished:
        finished([completion(queue_seconds=0.25, first_token_seconds=0.5, total_seconds=2.0)])
    summary = metrics.summary()
    assert (summary["queue_seconds_p50"], summary["first_token_seconds_p90"], summary["total_seconds_p99"]) == (
        0.25,
        0.5,
        2.0,
    )
    assert metrics.histograms()["first_token_seconds"] == ([int(bound == 0.5) for bound in BOUNDS] + [0], 0.5)


# -- of a service -----------------------------------------------------------------------------------------------------


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
    call = in_thread(lambda: ask(engine, "cut", request_ids="mine"))
    until_running(engine, [1])
    engine.abort("mine")
    assert call.result(60.0).aborted
    for entry in engine.replica_table:
        engine.replica_table.set_state(entry.index, ReplicaState.QUARANTINED)
    with pytest.raises(NoReplicaError):
        ask(engine, ["a", "b"])
    counts = counted(engine.metrics)
    assert {name: counts[name] for name in ("requests", *OUTCOMES)} == {
        "requests": 11,
        "completed": 5,
        "aborted": 1,
        "timed_out": 2,
        "refused": 1,
        "failed": 2,
    }
    # two, the three of one request, two that had finished as their calls failed, and the cut one
    assert counts["sequences"] == 2 + 3 + 2 + 1


@pytest.mark.parametrize("method", ["generate", "agenerate"])
def test_what_a_death_starts_again_elsewhere_counts_as_retried(fleet: Callable[..., Any], method: str) -> None:
    service = fleet(1, lambda i, n: FakeReplica(i, die_under=lambda r: n < 1 and r.prompt == "hi"))
    if method == "generate":
        ask(service, ["hi"])
    else:
        asyncio.run(service.agenerate("hi"))
    ask(service, ["a", "b"])
    counts = counted(service.metrics)
    assert (counts["requests"], counts["completed"], counts["retried"]) == (3, 3, 1)


def test_arguments_that_are_refused_before_anything_is_sent_are_no_requests(serve: Callable[..., Any]) -> None:
    engine = serve()
    with pytest.raises(ValueError, match="timeout_seconds must be a number above 0"):
        ask(engine, timeout_seconds=-1)
    assert counted(engine.metrics) == {}


def test_a_service_without_metrics_serves_all_the_same(serve: Callable[..., Any]) -> None:
    engine = serve(metrics=False, token_seconds=slow_if("slow"))
    assert len(ask(engine).outputs) == 1
    with pytest.raises(GenerationTimeout):
        ask(engine, "slow", timeout_seconds=0.05)
    assert engine.metrics.summary() == {}
