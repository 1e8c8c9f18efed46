"""Every metric of a service: its name in tables, its name and help in Prometheus, and where it is read.

A replica's metrics are rows of ``stats()``; the service's own are counted by
:class:`~torchrl_moe.modules.serving.metrics.Metrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from torchrl_moe.modules.backends.reports import ReplicaStats
from torchrl_moe.modules.serving.candidates import TableEntry

__all__ = [
    "COUNTERS",
    "ENGINE_COUNTERS",
    "OF_THE_ENGINE",
    "OF_THE_TABLE",
    "OUTCOMES",
    "ReplicaMetric",
    "breaker_state",
    "replica_row",
]


@dataclass(frozen=True, slots=True)
class ReplicaMetric:
    """One metric of a replica.

    Attributes:
        name: its key in ``stats()``.
        kind: a ``"counter"`` only grows, across restarts too; a ``"gauge"`` is a current value; a ``"label"`` is text.
        read: returns it, from the replica table's entry or from the engine's own stats.
        exported: its name in Prometheus; ``""``: it is not there.
        meaning: Prometheus' help.
        number: its value in Prometheus.
    """

    name: str
    kind: Literal["counter", "gauge", "label"]
    read: Callable[[Any], Any]
    exported: str = ""
    meaning: str = ""
    number: Callable[[Any], float] = float


def breaker_state(entry: TableEntry) -> str:
    """Return the state of a replica's circuit breaker: closed, unless it failed too often."""
    return str(entry.breaker.state.value)


def _of(
    name: str, kind: Literal["counter", "gauge"], exported: str, meaning: str, attribute: str = ""
) -> ReplicaMetric:
    return ReplicaMetric(name, kind, attrgetter(attribute or name), exported, meaning)


OF_THE_TABLE: tuple[ReplicaMetric, ...] = (
    ReplicaMetric("replica", "label", attrgetter("index")),
    ReplicaMetric("state", "label", attrgetter("state.name")),
    _of("version", "gauge", "policy_version", "Version of the weights."),
    _of("inflight", "gauge", "inflight_requests", "Requests sent to the replica that have not ended."),
    ReplicaMetric("breaker", "label", breaker_state, "breaker_open", "1 unless the circuit breaker is closed.",
                  lambda state: state != "closed"),
    _of("restarts", "counter", "restarts", "Restarts of the replica."),
    _of("not_finite_logprobs", "counter", "not_finite_logprobs", "Log-probs of its answers that were NaN or infinite.",
        "not_finite"),
    ReplicaMetric("last_error", "label", attrgetter("last_error")),
)  # fmt: skip
"""What the service knows of a replica: read from a :class:`TableEntry`."""

OF_THE_ENGINE: tuple[ReplicaMetric, ...] = (
    _of("running", "gauge", "running_sequences", "Answers being generated."),
    _of("waiting", "gauge", "waiting_sequences", "Answers in the engine's queue."),
    _of("cache_usage", "gauge", "kv_cache_usage_ratio", "Share of KV blocks in use, 0 to 1."),
    _of("tokens_per_second", "gauge", "tokens_per_second", "Tokens generated, of the last second."),
    _of("requests", "counter", "requests", "Requests that the engine ended."),
    _of("completions", "counter", "sequences", "Answers that the engine ended."),
    _of("prompt_tokens", "counter", "prompt_tokens", "Prompt tokens of ended requests."),
    _of("cached_tokens", "counter", "cached_tokens", "Those of them found in the prefix cache."),
    _of("generated_tokens", "counter", "generated_tokens", "Tokens of ended requests."),
    _of("generation_seconds", "counter", "generation_seconds", "Seconds that requests spent in the engine, summed."),
    _of("cache_queries", "counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    _of("cache_hits", "counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    _of("preemptions", "counter", "preemptions", "Requests that lost their KV blocks and were recomputed."),
    _of("steps", "counter", "steps", "Steps of the engine."),
    _of("step_at", "gauge", "last_step_timestamp_seconds", "When the engine last ended a step."),
    _of("weights_version", "gauge", "", ""),
    _of("hit_rate", "gauge", "", ""),
)
"""What an engine reports: read from its :class:`ReplicaStats`."""

ENGINE_COUNTERS = tuple(metric.name for metric in OF_THE_ENGINE if metric.kind == "counter")

OUTCOMES = {
    "completed": "returned whole",
    "aborted": "cut short: by an abort, Ctrl-C, a cancelled task, or an error of another request of the call",
    "timed_out": "not finished at their deadline",
    "refused": "that the engine or the service would not take",
    "failed": "that a replica failed, or that found none to serve them",
}
"""The outcomes of requests: every request ends in one of them."""

COUNTERS = {
    "requests": "Requests given to the service.",
    **{name: f"Requests {meaning}." for name, meaning in OUTCOMES.items()},
    "retried": "Times that a request was started again on another replica.",
    "sequences": "Answers returned.",
    "prompt_tokens": "Prompt tokens of the requests that were answered.",
    "cached_tokens": "Those of them found in a prefix cache.",
    "generated_tokens": "Tokens of the answers.",
    "generation_seconds": "Seconds from a request's arrival at its engine to its last token, summed.",
}
"""What the service counts of its requests."""


def replica_row(entry: TableEntry, stats: ReplicaStats | None) -> dict[str, Any]:
    """Return all metrics of a replica as one flat dictionary, without the engine's part if it reported none."""
    row = {metric.name: metric.read(entry) for metric in OF_THE_TABLE}
    return row if stats is None else row | {metric.name: metric.read(stats) for metric in OF_THE_ENGINE}
