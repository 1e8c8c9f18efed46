"""True figures of the scheduler, through vLLM's stat-logger interface: requests running and waiting, KV usage."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

__all__ = ["LoadLogger"]


class LoadLogger(StatLoggerBase):
    """Keeps the figures of the last step. Give vLLM its :meth:`factory`, which hands out this very object."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.cache_usage = 0.0

    def factory(self, vllm_config: Any, engine_index: int = 0) -> LoadLogger:
        """Answer vLLM's call for a logger per data-parallel engine: one serves them all."""
        del vllm_config, engine_index
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Take the scheduler's figures of one step."""
        del iteration_stats, mm_cache_stats, engine_idx
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs
            self.cache_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Say nothing: vLLM's own loggers do."""
