"""The figures of the last step, as vLLM hands them to a stat logger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def load() -> Any:
    from torchrl_moe.modules.backends.vllm.load_logger import LoadLogger  # its base is vLLM's

    return LoadLogger()


def figures(load: Any) -> tuple[int, int, float]:
    return load.running, load.waiting, load.cache_usage


def stats(running: int, waiting: int, usage: float) -> Any:
    return SimpleNamespace(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage)


def test_the_last_step_counts_and_a_step_without_figures_changes_nothing(load: Any) -> None:
    assert figures(load) == (0, 0, 0.0)
    load.record(stats(3, 2, 0.25), None)
    load.record(None, object())
    assert figures(load) == (3, 2, 0.25)
    load.record(stats(1, 0, 0.125), None, mm_cache_stats=None, engine_idx=1)
    assert figures(load) == (1, 0, 0.125)


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
