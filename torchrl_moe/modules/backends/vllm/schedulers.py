"""vLLM's schedulers with one switch set: they hand on which words sampling kept, which a hook in the workers says.

vLLM 0.30 sets it by ``return_sampling_mask``, and then refuses each model runner but its newest, which has no CPU. Read
in the engine core only, which makes a scheduler by its name.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

__all__ = ["AsyncMaskScheduler", "MaskScheduler"]


class MaskScheduler(Scheduler):
    """Of an engine that waits for each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.return_sampling_mask = True


class AsyncMaskScheduler(AsyncScheduler):
    """Of an engine that does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.return_sampling_mask = True
