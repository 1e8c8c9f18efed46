"""What :class:`~torchrl_moe.modules.vLLMWrapper` makes of its constructor's arguments, and what it refuses of them."""

from __future__ import annotations

import os
from typing import Any

import torch

from torchrl_moe.modules.policies.engine_scorer import EngineScorer
from torchrl_moe.modules.policies.generate_kwargs import engine_arguments_of
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.modules.serving.service import GenerationService

__all__ = ["engine_of", "keeps_routes", "refuse", "scorer_of", "set_no_batching", "split_arguments", "tokenizer_of"]

INPUT_MODES = ("history", "text", "tokens")


def refuse(arguments: dict[str, Any]) -> None:
    """Refuse what cannot be meant, before an engine is started."""
    if not arguments["generate"]:
        _refuse_to_score(arguments)
    elif given := sorted(name for name in ("replay", "temperature") if arguments[name] is not None):
        raise ValueError(f"{given[0]} is of scoring, generate=False; a generating wrapper samples by generate_kwargs")
    if arguments["input_mode"] not in INPUT_MODES:
        raise ValueError(f"input_mode must be one of {INPUT_MODES}, got {arguments['input_mode']!r}")
    if arguments["pad_model_input"] is not None:
        raise ValueError("pad_model_input must be None: vLLM takes prompts without padding")
    if arguments["batching"] or arguments["min_batch_size"] or arguments["max_batch_size"]:
        raise ValueError("batching is the engine's: it batches the requests of all threads as they come; leave it out")
    if arguments["layout"] not in (None, torch.strided):
        raise ValueError(f"layout must be None or torch.strided, got {arguments['layout']}")
    num_samples = arguments["num_samples"]
    if num_samples is not None and num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")


def _refuse_to_score(arguments: dict[str, Any]) -> None:
    """Refuse what cannot be meant of a wrapper that scores."""
    if arguments["input_mode"] != "tokens":
        raise ValueError(
            f"input_mode={arguments['input_mode']!r} with generate=False: text may be encoded to other tokens than "
            "those that were sampled and routed. input_mode='tokens' reads ('tokens', 'full') of the rollout."
        )
    if arguments["replay"] not in (None, "R3", "none"):
        raise ValueError(f"replay must be 'R3' or 'none', got {arguments['replay']!r}: an engine records no R2")
    if arguments["temperature"] is not None and not arguments["temperature"] > 0:
        raise ValueError(f"temperature must be positive, got {arguments['temperature']}")
    of_generating = {"num_samples": None, "return_log_probs": True, "return_routed_experts": None, "pad_output": False}
    for name, silent in of_generating.items():
        if arguments[name] not in (silent, None):
            raise ValueError(f"{name}={arguments[name]!r} is of generating: leave it out with generate=False")


def scorer_of(engine: GenerationService, arguments: dict[str, Any], asked: dict[str, Any]) -> EngineScorer | None:
    """Return what scores in place of generating; ``None`` if the wrapper generates.

    Args:
        engine: the service.
        arguments: the wrapper's.
        asked: those of the engine's ``generate`` among them.
    """
    if arguments["generate"]:
        return None
    given: dict[str, Any] = {name: asked[name] for name in ("actor_index", "lora_request") if name in asked}
    return EngineScorer(
        engine=engine,
        replay=arguments["replay"] or "R3",
        temperature=arguments["temperature"],
        tokens_key=arguments["input_key"] or (arguments["tokens_key"], "full"),
        mask_key=(arguments["masks_key"], "all_attention_mask"),
        routed_experts_key=(arguments["routed_experts_key"], "full"),
        arguments={**given, "timeout_seconds": arguments["timeout_seconds"], "use_tqdm": arguments["use_tqdm"]},
    )


def split_arguments(generate_kwargs: dict[str, Any] | None, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the engine's arguments, those among the ``generate_kwargs`` too, and what these say of sampling."""
    given, sampling = engine_arguments_of(generate_kwargs)
    if twice := sorted(name for name in given if arguments.get(name) is not None):
        raise ValueError(f"{', '.join(twice)}: given twice, also in generate_kwargs. Leave it out of one.")
    return {**arguments, **given}, sampling


def engine_of(model: Any) -> GenerationService:
    """Return the engine, started if a folder or a name was given."""
    if isinstance(model, str | os.PathLike):
        return AsyncVLLM.from_pretrained(model)
    if not isinstance(model, GenerationService):
        raise TypeError(f"model must be an AsyncVLLM, a folder or a hub name, got {type(model).__name__}")
    return model


def set_no_batching(wrapper: Any) -> None:
    """Set what TorchRL's base class reads of batching, which here is the engine's."""
    wrapper._min_batch_size = wrapper._max_batch_size = wrapper._batching_lock = None
    wrapper._batch_queue, wrapper._futures = [], []


def tokenizer_of(tokenizer: Any, engine: GenerationService) -> Any:
    """Return the tokenizer: as given, by its name, or the engine's."""
    if tokenizer is None:
        return engine.get_tokenizer()
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer)
    return tokenizer


def keeps_routes(wanted: bool | None, engine: GenerationService) -> bool:
    """Whether routes are written: as wanted, else if the engine captures them."""
    captured = engine.routing_layout is not None
    if wanted and not captured:
        raise ValueError(
            "return_routed_experts=True, but the engine captures no routes: its model is dense, or it was started "
            "with enable_return_routed_experts=False"
        )
    return captured if wanted is None else wanted
