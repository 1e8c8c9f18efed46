"""The scheduler's own stats, through vLLM's stat-logger interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerBase

from torchrl_moe.modules.backends.process.engine_program import Load

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

__all__ = ["LoadLogger"]


class LoadLogger(StatLoggerBase):
    """Keeps a :class:`Load`. Give vLLM its :meth:`factory`, which returns this very object."""

    def __init__(self) -> None:
        self.load = Load()
        self._of_engines: dict[int, tuple[int, int, float]] = {}

    def factory(self, vllm_config: VllmConfig, engine_index: int = 0) -> LoadLogger:
        """Return this logger for each data-parallel engine: it sums them up."""
        del vllm_config, engine_index
        return self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the stats of one step: the scheduler's, and those of the tokens that came out."""
        del mm_cache_stats
        load = self.load
        if scheduler_stats is not None:
            of_engine = (
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
            )
            self._of_engines[engine_idx] = of_engine
            running, waiting, usages = zip(*self._of_engines.values(), strict=True)
            load.running, load.waiting = sum(running), sum(waiting)
            load.cache_usage = sum(usages) / len(usages)
            load.cache_queries += scheduler_stats.prefix_cache_stats.queries
            load.cache_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            load.tokens += iteration_stats.num_generation_tokens
            load.preemptions += iteration_stats.num_preempted_reqs
            load.steps += 1
            load.step_at = iteration_stats.iteration_timestamp

    def log_engine_initialized(self) -> None:
        """Say nothing: vLLM's own loggers do."""
