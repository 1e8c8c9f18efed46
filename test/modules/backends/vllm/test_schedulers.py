"""The schedulers are vLLM's, with one switch set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize("name", ["MaskScheduler", "AsyncMaskScheduler"])
def test_a_scheduler_hands_masks_on_whatever_the_model_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from torchrl_moe.modules.backends.vllm import schedulers

    seen: list[Any] = []

    def init(self: Any, vllm_config: Any, *, block_size: int) -> None:
        seen.append((vllm_config, block_size))
        self.return_sampling_mask = vllm_config.model_config.return_sampling_mask

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(schedulers.AsyncScheduler, "__init__", init)
    config = SimpleNamespace(model_config=SimpleNamespace(return_sampling_mask=False))
    scheduler = getattr(schedulers, name)(config, block_size=16)
    assert scheduler.return_sampling_mask is True
    assert seen == [(config, 16)]


def test_the_schedulers_are_those_that_vllm_would_take() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from torchrl_moe.modules.backends.vllm.schedulers import AsyncMaskScheduler, MaskScheduler

    assert MaskScheduler.__bases__ == (Scheduler,)
    assert AsyncMaskScheduler.__bases__ == (AsyncScheduler,)
