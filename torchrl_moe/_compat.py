"""The only file that touches private names, or version differences, of vLLM and TorchRL.

Imports of either library stay inside the functions, so this file is light; each function says what it reaches for and
why there is no public way.
"""

from __future__ import annotations

from typing import Any

__all__ = ["plain_tokenizer", "router_layer_ids", "vllm_client_errors"]


def router_layer_ids(model: Any) -> list[int]:
    """Return the sorted decoder-layer indices of ``model``'s MoE routers, in a vLLM worker (0.30 to 0.33).

    vLLM's own capture binds to these two kinds of module; it has no public list of them.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource

    kinds = (MoERunner, RoutedExpertsCaptureSource)
    return sorted({int(module.layer_id) for module in model.modules() if isinstance(module, kinds)})


def vllm_client_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions by which vLLM says that a request, not the engine, is at fault."""
    from vllm import exceptions

    client = getattr(exceptions, "VLLMClientError", None)
    return (ValueError, TypeError) if client is None else (ValueError, TypeError, client)


def plain_tokenizer(tokenizer: Any) -> Any:
    """Return the transformers tokenizer inside vLLM's caching and pooling proxies, so that it unpickles without vLLM.

    The proxies' classes are made on the fly; the original is found only in what they tell pickle.
    """
    while type(tokenizer).__module__.startswith("vllm."):
        _, arguments = tokenizer.__reduce__()[:2]
        tokenizer = arguments[0]
    return tokenizer
