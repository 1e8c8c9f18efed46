"""The stats of the last step, as vLLM hands them to a stat logger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe.modules.backends.process.engine_program import Load


@pytest.fixture
def load() -> Any:
    from torchrl_moe.modules.backends.vllm.load_logger import LoadLogger  # its base is vLLM's

    return LoadLogger()


def scheduler(running: int, waiting: int, usage: float, queries: int = 0, hits: int = 0) -> Any:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        kv_cache_usage=usage,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
    )


def iteration(tokens: int, preempted: int, at: float) -> Any:
    return SimpleNamespace(num_generation_tokens=tokens, num_preempted_reqs=preempted, iteration_timestamp=at)


def test_the_last_step_says_what_is_and_all_steps_are_counted(load: Any) -> None:
    assert load.load == Load()
    load.record(scheduler(3, 2, 0.25, queries=10, hits=4), iteration(5, 1, 1000.0))
    assert load.load == Load(
        running=3,
        waiting=2,
        cache_usage=0.25,
        tokens=5,
        cache_queries=10,
        cache_hits=4,
        preemptions=1,
        steps=1,
        step_at=1000.0,
    )
    load.record(scheduler(1, 0, 0.125, queries=6), iteration(2, 0, 1001.0), mm_cache_stats=None, engine_idx=0)
    assert load.load == Load(1, 0, 0.125, 7, 16, 4, 1, 2, 1001.0)


def test_data_parallel_engines_are_added_up(load: Any) -> None:
    load.record(scheduler(3, 2, 0.25), None, engine_idx=0)
    load.record(scheduler(4, 0, 0.75), None, engine_idx=1)
    assert load.load == Load(7, 2, 0.5)
    load.record(scheduler(0, 1, 0.0), None, engine_idx=0)
    assert load.load == Load(4, 1, 0.375)


def test_a_step_without_one_half_of_its_figures_leaves_that_half(load: Any) -> None:
    load.record(scheduler(3, 2, 0.25), None)
    assert load.load == Load(3, 2, 0.25)
    load.record(None, iteration(4, 0, 5.0))
    assert load.load == Load(3, 2, 0.25, tokens=4, steps=1, step_at=5.0)


def test_vllms_own_figures_have_these_names(load: Any) -> None:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    theirs = IterationStats()
    load.record(SchedulerStats(num_running_reqs=2), theirs)
    assert load.load == Load(running=2, steps=1, step_at=theirs.iteration_timestamp)


def test_the_factory_hands_out_the_logger_itself(load: Any) -> None:
    assert load.factory(object()) is load
    assert load.factory(object(), 1) is load


def test_it_can_do_all_that_vllm_asks_of_a_logger(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm.v1.metrics.loggers import StatLoggerBase

    assert isinstance(load, StatLoggerBase)
    load.log_engine_initialized()
    load.log()
    load.record_sleep_state(1, 1)
    assert capsys.readouterr() == ("", "")
