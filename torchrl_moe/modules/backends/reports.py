"""What a replica reports: once it serves, while it does, and after a command. All are plain data classes."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_moe.data import RoutingLayout

__all__ = ["ProbeReport", "ReplicaInfo", "ReplicaStats", "SwapReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a replica reports once it serves.

    ``layout`` is ``None`` if no routes are captured. ``dtype``: torch's name of what the model computes in, if known.
    ``why_live``: why the engine cannot follow recorded experts; empty if it can.
    """

    model: str
    layout: RoutingLayout | None
    max_model_len: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    engine_version: str = ""
    dtype: str = ""
    why_live: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """A replica's own stats, read at one moment; counts are since its engine started.

    Attributes:
        running: answers being generated.
        waiting: requests in the engine's queue.
        cache_usage: share of KV blocks in use, 0 to 1.
        tokens_per_second: generated during the last second.
        requests: finished, aborted ones included; the next five fields count only finished requests.
        completions: answers.
        prompt_tokens: of their prompts.
        cached_tokens: those of them found in the prefix cache.
        generated_tokens: of their answers.
        generation_seconds: from arrival to end, summed.
        cache_queries: prompt tokens looked up in the prefix cache, as requests are scheduled.
        cache_hits: those found.
        preemptions: times that a request lost its KV blocks to others and must be recomputed.
        steps: of the engine.
        step_at: when the last one ended, in seconds since the epoch; 0 before the first.
        weights_version: of the weights that the engine serves, from any driver; 0 for the checkpoint's.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    tokens_per_second: float = 0.0
    requests: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_at: float = 0.0
    weights_version: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, 0 to 1; 0 before the first."""
        return self.cache_hits / self.cache_queries if self.cache_queries else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """How far a replica got with a version: seconds pausing, loading, and paused in total; or why it failed.

    One that was not ``started`` still has its old weights. ``unproved`` says why there was no weight check.
    """

    started: bool = True
    pausing_seconds: float = 0.0
    loading_seconds: float = 0.0
    paused_seconds: float = 0.0
    unproved: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The health of an engine, as the process that owns it reports: the reply to the command ``probe``.

    Attributes:
        core_answered: whether the engine core answered a ping in time; one in the middle of a long step does not.
        stopped: whether one of the engine's processes is stopped by a signal.
        cpu_seconds: CPU time of its processes, without the owner's.
    """

    core_answered: bool
    stopped: bool = False
    cpu_seconds: float = 0.0
