"""The only file that touches private names, or version differences, of vLLM and TorchRL.

Imports of either library stay inside the functions, so this file is light; each function says what it reaches for and
why there is no public way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

__all__ = [
    "delivered_tokens",
    "forget_half_loads",
    "keep_cpu_experts_with_lora",
    "plain_tokenizer",
    "register_weight_engine",
    "restore_moe_kernels",
    "router_layer_ids",
    "take_moe_kernels",
    "vllm_client_errors",
]


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

    A proxy is a shallow copy under a subclass that is made on the fly and has no public way back. A tokenizer that is
    vLLM's own (Mistral's) is returned as it is.
    """
    not_a_tokenizer = {"builtins", "typing", "typing_extensions"}
    for kind in type(tokenizer).__mro__:
        if kind.__module__.startswith("vllm.") or kind.__module__ in not_a_tokenizer:
            continue
        plain: Any = object.__new__(kind)
        plain.__dict__.update(vars(tokenizer))
        return plain
    return tokenizer


WEIGHT_BACKEND = "torchrl_moe"


def register_weight_engine() -> None:
    """Make our weight engine known to vLLM, in a worker process; more than once does no harm.

    The factory has no way to ask for a name but to register it.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(
            WEIGHT_BACKEND, "torchrl_moe.modules.backends.vllm.weight_engine", "WeightEngine"
        )


def take_moe_kernels(model: Any) -> list[tuple[Any, Any]]:
    """Take the packed expert kernel off every MoE layer; return the owners and their kernels.

    vLLM 0.30 packs the experts for the CPU only while there is no kernel: reloaded weights would stay unpacked, and be
    read in the wrong layout.
    """
    methods = {id(m.quant_method): m.quant_method for m in model.modules() if hasattr(m, "quant_method")}
    taken = [(method, getattr(method, "moe_kernel", None)) for method in methods.values()]
    taken = [(method, kernel) for method, kernel in taken if kernel is not None]
    for method, _ in taken:
        method.moe_kernel = None
    return taken


def restore_moe_kernels(taken: list[tuple[Any, Any]]) -> None:
    """Give kernels back to the layers that were not reloaded, and so did not make new ones."""
    for method, kernel in taken:
        if method.moe_kernel is None:
            method.moe_kernel = kernel


def keep_cpu_experts_with_lora() -> None:
    """Have vLLM choose its CPU kernel for the experts of a CPU worker, LoRA or not (0.30).

    With LoRA on it takes the Triton kernel on every platform, and the first step dies. The experts themselves take no
    adapter on CPU: :func:`~torchrl_moe.modules.backends.vllm.engine_args.build_engine_args` sees to that.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    choose = method.select_unquantized_moe_backend

    def choose_for_cpu(moe_config: Any) -> Any:
        return choose(dataclasses.replace(moe_config, is_lora_enabled=False))

    method.select_unquantized_moe_backend = choose_for_cpu


def forget_half_loads(model: Any) -> None:
    """Drop what an update that failed midway left waiting in vLLM's layerwise reload.

    Starting anew skips layers that are taken apart already, and would count those tensors twice: the layer would be put
    together before its last tensors arrive.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()


def delivered_tokens(engine: Any) -> dict[str, dict[int, int]]:
    """Return, for each request that an ``AsyncLLM`` runs, answer -> tokens that its output processor has (0.30, 0.31).

    With ``FINAL_ONLY`` there is no other way to know; vLLM >= 0.32 gives a version with each token.
    """
    counts: dict[str, dict[int, int]] = {}
    for state in engine.output_processor.request_states.values():
        if state.detokenizer is not None:
            had = counts.setdefault(state.external_req_id, {})
            had[state.request_index] = state.detokenizer.num_output_tokens()
            if state.parent_req is not None:  # answers that finished already wait for their siblings there
                for output in state.parent_req.output_aggregator:
                    if output is not None:
                        had.setdefault(output.index, len(output.token_ids))
    return counts
