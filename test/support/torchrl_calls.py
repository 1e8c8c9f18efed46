"""A call of each of our classes that TorchRL has too, to which an argument can be added: is it refused by its name?

Nothing here starts an engine: what is refused is refused before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.rollouts import BigramActor


def _loss(name: str) -> Callable[..., Any]:
    from torchrl_moe import objectives

    return lambda **arguments: getattr(objectives, name)(BigramActor(), **arguments)


def _llm_collector(**arguments: Any) -> Any:
    from torchrl_moe.collectors import LLMCollector
    from torchrl_moe.modules import vLLMWrapper
    from torchrl_moe.testing import FakeAsyncVLLM

    with FakeAsyncVLLM() as engine:
        return LLMCollector(None, **{"policy": vLLMWrapper(engine, input_mode="tokens"), **arguments})  # type: ignore[arg-type]


def _async_collector(**arguments: Any) -> Any:
    from torchrl_moe.collectors import AsyncLLMCollector

    return AsyncLLMCollector(None, **arguments)  # type: ignore[arg-type]


CALLS: dict[str, Callable[..., Any]] = {
    "GRPOLoss": _loss("GRPOLoss"),
    "DAPO": _loss("DAPO"),
    "CISPOLoss": _loss("CISPOLoss"),
    "LLMCollector": _llm_collector,
    "AsyncLLMCollector": _async_collector,
}
"""By the title of the pair; by ``title.method`` for what a method refuses."""
