"""Collecting rollouts (namesake: ``torchrl.collectors.llm``)."""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.collectors.async_collector import AsyncLLMCollector as AsyncLLMCollector
    from torchrl_moe.collectors.llm_collector import LLMCollector as LLMCollector
    from torchrl_moe.collectors.ray_collectors import RayAsyncLLMCollector as RayAsyncLLMCollector
    from torchrl_moe.collectors.ray_collectors import RayLLMCollector as RayLLMCollector
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".async_collector": "AsyncLLMCollector",
            ".llm_collector": "LLMCollector",
            ".ray_collectors": "RayAsyncLLMCollector RayLLMCollector",
        },
    )
