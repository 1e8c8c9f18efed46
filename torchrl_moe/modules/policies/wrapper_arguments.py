"""How :class:`~torchrl_moe.modules.vLLMWrapper` reads its constructor's arguments, and which it refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch

from torchrl_moe._errors import EngineError
from torchrl_moe.modules.policies.engine_scorer import EngineScorer
from torchrl_moe.modules.policies.generate_kwargs import engine_arguments_of, sampling_params_of
from torchrl_moe.modules.policies.prompt_reading import check_templates, refuse_batching
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.modules.serving.sampling_parameters import SamplingParameters
from torchrl_moe.modules.serving.service import GenerationService

__all__ = [
    "changed_arguments",
    "engine_of",
    "keeps_routes",
    "model_of",
    "refuse",
    "sampling_parameters_of",
    "scorer_of",
    "split_arguments",
    "tokenizer_of",
]

INPUT_MODES = ("history", "text", "tokens")
OF_GENERATING = ("num_samples", "return_routed_experts")


def refuse(arguments: dict[str, Any]) -> None:
    """Refuse invalid values, before an engine is started."""
    check_templates(arguments)
    if not arguments["generate"]:
        _refuse_to_score(arguments)
    elif given := sorted(name for name in ("replay", "temperature") if arguments[name] is not None):
        raise ValueError(f"{given[0]} is for scoring, generate=False; generate_kwargs set how a wrapper samples")
    if arguments["input_mode"] not in INPUT_MODES:
        raise ValueError(f"input_mode must be one of {INPUT_MODES}, got {arguments['input_mode']!r}")
    if arguments["pad_model_input"] is not None:
        raise ValueError("pad_model_input must be None: vLLM takes prompts without padding")
    if not isinstance(arguments["pad_output"], bool):
        raise ValueError(f"pad_output must be a boolean, got {arguments['pad_output']!r}")
    if arguments["layout"] not in (None, torch.strided):
        raise ValueError(f"layout must be None or torch.strided, got {arguments['layout']}")
    refuse_batching(arguments, "the engine batches the requests of all threads")
    num_samples = arguments["num_samples"]
    if num_samples is not None and num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")


def _refuse_to_score(arguments: dict[str, Any]) -> None:
    """Refuse invalid values of a wrapper that scores."""
    if arguments["return_log_probs"] is False:
        raise ValueError("return_log_probs must be True when generate=False: log-probs are all that it computes")
    if arguments["replay"] not in (None, "R3", "none"):
        raise ValueError(f"replay must be 'R3' or 'none', got {arguments['replay']!r}: an engine records no R2")
    if arguments["replay"] == "R3" and arguments["input_mode"] != "tokens":
        raise ValueError(
            f"replay='R3' with input_mode={arguments['input_mode']!r}: text may be encoded to other tokens than those "
            "that were sampled and routed. input_mode='tokens' reads ('tokens', 'full') of the rollout."
        )
    if arguments["temperature"] is not None and not arguments["temperature"] > 0:
        raise ValueError(f"temperature must be positive, got {arguments['temperature']}")
    for name in OF_GENERATING:
        if arguments[name] is not None:
            raise ValueError(f"{name}={arguments[name]!r} is for generation: leave it out with generate=False")


def changed_arguments(arguments: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a new version.

    Args:
        arguments: of the existing wrapper.
        changes: for the new one. If they change the input or whether it generates, related arguments are
            reset to their defaults, unless they are changed too.

    Raises:
        TypeError: an unknown argument.
    """
    if unknown := sorted(set(changes) - set(arguments)):
        raise TypeError(f"get_new_version got unknown arguments {unknown}; known: {sorted(arguments)}")
    follow: dict[str, Any] = {}
    if any(changes.get(name, arguments[name]) != arguments[name] for name in ("generate", "input_mode")):
        follow["input_key"] = None
    if changes.get("generate", arguments["generate"]) != arguments["generate"]:
        follow |= dict.fromkeys((*OF_GENERATING, "replay", "temperature", "return_log_probs"))
    return {**arguments, **follow, **changes}


def scorer_of(engine: GenerationService, arguments: dict[str, Any], asked: dict[str, Any]) -> EngineScorer | None:
    """Return the scorer, which asks ``generate`` for what is in ``asked``; ``None`` if the wrapper generates."""
    if arguments["generate"]:
        return None
    given: dict[str, Any] = {name: asked[name] for name in ("actor_index", "lora_request") if name in asked}
    follows = arguments["input_mode"] == "tokens" and engine.routing_layout is not None
    replay: Literal["R3", "none"] = arguments["replay"] or ("R3" if follows else "none")
    return EngineScorer(
        engine=engine,
        replay=replay,
        temperature=arguments["temperature"],
        tokens_key=arguments["input_key"] or (arguments["tokens_key"], "full"),
        mask_key=(arguments["masks_key"], "all_attention_mask"),
        routed_experts_key=(arguments["routed_experts_key"], "full"),
        arguments={**given, "timeout_seconds": arguments["timeout_seconds"], "use_tqdm": arguments["use_tqdm"]},
    )


def split_arguments(generate_kwargs: dict[str, Any] | None, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the engine's arguments, including those in ``generate_kwargs``, and the remaining sampling settings."""
    given, sampling = engine_arguments_of(generate_kwargs)
    if twice := sorted(name for name in given if arguments.get(name) is not None):
        raise ValueError(f"{', '.join(twice)}: given twice, also in generate_kwargs. Leave it out of one.")
    return {**arguments, **given}, sampling


def sampling_parameters_of(
    generate_kwargs: dict[str, Any], num_samples: int | None, log_probs: bool
) -> SamplingParameters:
    """Return a wrapper's sampling parameters.

    Args:
        generate_kwargs: the caller's settings.
        num_samples: answers per prompt.
        log_probs: whether to return them.

    Raises:
        ValueError: another number of answers in ``generate_kwargs``, or an invalid setting.
    """
    params = sampling_params_of(generate_kwargs)
    if num_samples is not None and params.setdefault("n", num_samples) != num_samples:
        raise ValueError(f"num_samples={num_samples} differs from generate_kwargs['n']={params['n']}")
    if log_probs:
        params.setdefault("logprobs", 0)
    params.setdefault("include_stop_str_in_output", True)
    params.setdefault("skip_special_tokens", False)
    return SamplingParameters(params)


def model_of(model: Any) -> Any:
    """Return the model; for a folder or a name, start an :class:`AsyncVLLM`."""
    if isinstance(model, str | os.PathLike):
        return AsyncVLLM.from_pretrained(model)
    return model


def engine_of(model: Any) -> GenerationService:
    """Return the engine interface of a model."""
    if isinstance(model, GenerationService):
        return model
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    raise TypeError(
        f"model must be an AsyncVLLM, a folder or a hub name, got {name}. AsyncVLLM.from_pretrained(path, ...) takes "
        "the arguments of a vllm.LLM or of TorchRL's engine; AsyncVLLM.connect(name) reaches an engine in Ray."
    )


def tokenizer_of(tokenizer: Any, engine: GenerationService) -> Any:
    """Return the tokenizer: as given, by its name, or the engine's.

    Raises:
        ValueError: it is another model's: to the engine, most of its ids stand for other tokens.
    """
    if tokenizer is None:
        return engine.get_tokenizer()
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    try:
        own = {number: token for token, number in engine.get_tokenizer().get_vocab().items()}
        given = [pair for pair in tokenizer.get_vocab().items() if pair[1] in own]
    except (AttributeError, ValueError, EngineError):  # the engine has none that can be sent, or it lists no tokens
        return tokenizer
    others = [(number, token) for token, number in given if own[number] != token]
    if 2 * len(others) > len(given):  # a few may be renamed: those that a model has in reserve
        number, token = min(others)
        raise ValueError(
            f"tokenizer: {len(others)} of {len(given)} ids stand for other tokens in the engine's, such as "
            f"{number}: {token!r}, there {own[number]!r}. Pass the tokenizer of the engine's model, or none"
        )
    return tokenizer


def keeps_routes(wanted: bool | None, engine: GenerationService) -> bool:
    """Whether routes are written: as passed; by default if the engine captures them."""
    captured = engine.routing_layout is not None
    if wanted and not captured:
        raise ValueError(
            "return_routed_experts=True, but the engine captures no routes: its model is dense, or it was started "
            "with enable_return_routed_experts=False"
        )
    return captured if wanted is None else wanted
