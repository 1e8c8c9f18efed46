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


def _engine(**arguments: Any) -> Any:
    from torchrl_moe.modules import AsyncVLLM

    return AsyncVLLM({"model": "no model"}, **arguments)


def _generate(**arguments: Any) -> Any:
    from torchrl_moe.testing import FakeAsyncVLLM

    with FakeAsyncVLLM() as engine:
        return engine.generate("Hello", **arguments)


def _policy(**arguments: Any) -> Any:
    from torchrl_moe.modules import vLLMWrapper
    from torchrl_moe.testing import FakeAsyncVLLM

    with FakeAsyncVLLM() as engine:
        return vLLMWrapper(**{"model": engine, "input_mode": "tokens", **arguments})


def _scorer(**arguments: Any) -> Any:
    from torch import nn

    from torchrl_moe.modules import TransformersWrapper

    return TransformersWrapper(nn.Linear(1, 1), **arguments)


def _llm_collector(**arguments: Any) -> Any:
    from torchrl_moe.collectors import LLMCollector
    from torchrl_moe.modules import vLLMWrapper
    from torchrl_moe.testing import FakeAsyncVLLM

    with FakeAsyncVLLM() as engine:
        return LLMCollector(None, **{"policy": vLLMWrapper(engine, input_mode="tokens"), **arguments})  # type: ignore[arg-type]


def _async_collector(**arguments: Any) -> Any:
    from torchrl_moe.collectors import AsyncLLMCollector

    return AsyncLLMCollector(None, **arguments)  # type: ignore[arg-type]


def _scheme(*path: str, **given: Any) -> Callable[..., Any]:
    """Call a method of what a weight sync's scheme makes, or its constructor."""
    from torchrl_moe.testing.fake_weights import FakeFleet
    from torchrl_moe.weight_update import VLLMWeightSyncScheme

    def call(**arguments: Any) -> Any:
        if not path:
            return VLLMWeightSyncScheme(**{**given, **arguments})
        made: Any = VLLMWeightSyncScheme()
        for name in path[:-1]:
            made = getattr(made, name)(*([FakeFleet(1)] if name == "create_receiver" else []))
        return getattr(made, path[-1])(**arguments)

    return call


def _directory(**arguments: Any) -> Any:
    from torchrl_moe.weight_update import VLLMDoubleBufferTransport

    return VLLMDoubleBufferTransport("no such folder").receive_weights(**arguments)


CALLS: dict[str, Callable[..., Any]] = {
    "GRPOLoss": _loss("GRPOLoss"),
    "DAPO": _loss("DAPO"),
    "CISPOLoss": _loss("CISPOLoss"),
    "AsyncVLLM": _engine,
    "AsyncVLLM.generate": _generate,
    "LLMCollector": _llm_collector,
    "TransformersWrapper": _scorer,
    "vLLMWrapper": _policy,
    "AsyncLLMCollector": _async_collector,
    "VLLMWeightSyncScheme": _scheme(transport="gloo"),
    "VLLMWeightSyncScheme.init_on_receiver": _scheme("init_on_receiver"),
    "VLLMWeightSender.init_all_workers_group": _scheme("create_sender", "init_all_workers_group"),
    "VLLMWeightReceiver.apply_weights": _scheme("create_receiver", "apply_weights"),
    "VLLMDoubleBufferTransport.receive_weights": _directory,
}
"""By the title of the pair; by ``title.method`` for what a method refuses."""
