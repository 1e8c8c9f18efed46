"""The schedulers are vLLM's, with one switch set by what the engine is; real ones are in test_forced_routing.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe._compat_routing import SCHEDULERS


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
@pytest.mark.parametrize("name", ["MoEScheduler", "AsyncMoEScheduler"])
def test_a_scheduler_hands_masks_on_whatever_the_model_says(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from torchrl_moe.modules.backends.vllm import schedulers

    seen: list[Any] = []

    def init(self: Any, vllm_config: Any, *, block_size: int) -> None:
        seen.append((vllm_config, block_size))
        self.vllm_config, self.return_sampling_mask = vllm_config, False

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(schedulers.AsyncScheduler, "__init__", init)
    model = SimpleNamespace(logprobs_mode=mode, logits_processors=None, enable_return_routed_experts=False)
    scheduling = SimpleNamespace(scheduler_cls=f"{SCHEDULERS}.{name}")
    config = SimpleNamespace(
        model_config=model, scheduler_config=scheduling, parallel_config=SimpleNamespace(data_parallel_size=1, use_ubatching=False)
    )
    scheduler = getattr(schedulers, name)(config, block_size=16)
    assert scheduler.return_sampling_mask is (mode == "processed_logprobs")
    assert seen == [(config, 16)]


def test_the_schedulers_are_those_that_vllm_would_take() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from torchrl_moe.modules.backends.vllm.schedulers import AsyncMoEScheduler, MoEScheduler

    assert MoEScheduler.__bases__ == (Scheduler,)
    assert AsyncMoEScheduler.__mro__[1:4] == (MoEScheduler, AsyncScheduler, Scheduler)
