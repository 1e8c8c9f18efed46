"""How :class:`~torchrl_moe.modules.TransformersWrapper` reads its constructor's arguments, and which it refuses."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from torchrl_moe._compat_transformers import load_whole
from torchrl_moe._errors import UnsupportedRouterError
from torchrl_moe.modules.policies.prompt_reading import check_templates, refuse_batching
from torchrl_moe.modules.replay.discovery import has_experts
from torchrl_moe.modules.replay.incoming import ON_BAD_ROUTES
from torchrl_moe.modules.replay.parallelism import computing_device, refused_parallelism
from torchrl_moe.modules.replay.router_replay import RouterReplay

__all__ = [
    "OF_SCORING",
    "check_vocabulary",
    "complete",
    "model_of",
    "pad_of",
    "recorder_of",
    "refuse",
    "replay_of",
    "tokenizer_of",
]

INPUT_MODES = ("history", "text", "tokens")
REPLAYS = (None, "R3", "R2", "none")
LAYOUTS = (None, torch.strided, torch.jagged)
OF_SCORING = ("replay", "temperature", "pad_model_input")
"""Arguments that a generating wrapper refuses, and that its scoring versions may have."""


def complete(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the defaults of ``input_mode`` and ``generate`` filled in.

    A chat template, or ``generate=True`` alone, implies chats. Otherwise tokens are read, which a rollout's routes
    belong to. Chats and text are used for generation, tokens for scoring.

    Raises:
        ValueError: arguments for generation, where it is not clear that generation is meant.
    """
    mode = arguments["input_mode"]
    if mode is None:
        chats = ("chat_template", "chat_template_name", "generate")
        mode = "history" if any(arguments[name] for name in chats) else "tokens"
    if arguments["generate"] is None and mode == "tokens":
        for name in ("num_samples", "generate_kwargs"):
            if arguments[name]:
                raise ValueError(
                    f"{name} is for generation, and tokens are scored by default: pass generate=True or False"
                )
    generate = mode != "tokens" if arguments["generate"] is None else bool(arguments["generate"])
    return {**arguments, "input_mode": mode, "generate": generate}


def refuse(arguments: dict[str, Any]) -> None:
    """Refuse invalid values, before a model is loaded.

    Args:
        arguments: as :func:`complete` returns them.
    """
    check_templates(arguments)
    refuse_batching(arguments, "pass one batch")
    allowed = {
        "input_mode": INPUT_MODES,
        "replay": REPLAYS,
        "on_bad_routes": ON_BAD_ROUTES,
        "inplace": (None, True, False, "empty"),
        "pad_output": (True, False),
        "layout": LAYOUTS,
    }
    for name, values in allowed.items():
        if arguments[name] not in values:
            raise ValueError(f"{name} must be one of {values}, got {arguments[name]!r}")
    if arguments["num_samples"] is not None and arguments["num_samples"] < 1:
        raise ValueError(f"num_samples must be at least 1, got {arguments['num_samples']}")
    if arguments["generate"]:
        _refuse_to_generate(arguments)
    else:
        _refuse_to_score(arguments)


def _refuse_to_generate(arguments: dict[str, Any]) -> None:
    for name in OF_SCORING:
        if arguments[name] not in (None, "none"):
            raise ValueError(
                f"{name}={arguments[name]!r} is for scoring, generate=False. Sampling is set by generate_kwargs, "
                "prompts are padded on the left, and the model's own routes are recorded"
            )


def _refuse_to_score(arguments: dict[str, Any]) -> None:
    if arguments["return_log_probs"] is False:
        raise ValueError("return_log_probs must be True (or None) with generate=False: there is nothing else to write")
    if arguments["input_mode"] != "tokens" and arguments["replay"] not in (None, "none"):
        raise ValueError(
            f"replay={arguments['replay']!r} with input_mode={arguments['input_mode']!r}: encoding text again may give "
            "other tokens than those that were generated and routed. Use input_mode='tokens', which reads "
            "('tokens', 'full') of the rollout, or replay='none'"
        )
    if arguments["temperature"] is not None and not arguments["temperature"] > 0:
        raise ValueError(f"temperature must be positive, got {arguments['temperature']}")


def model_of(model: Any, device: Any = None, generate: bool = False) -> nn.Module:
    """Return the model: as given, or loaded from a folder or by its hub name.

    Args:
        model: a transformers model, a folder or a hub name.
        device: to compute on; a model that is passed in must already be there.
        generate: whether the model must be able to generate.

    Raises:
        TypeError: it is not a transformers model, ranks share it in an unsupported way, or it cannot generate.
        ValueError: it is on another device.
    """
    if isinstance(model, str | os.PathLike):
        from transformers import AutoModelForCausalLM

        loaded: nn.Module = load_whole(model, AutoModelForCausalLM.from_pretrained)
        return loaded if device is None else loaded.to(device)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers model, a folder or a hub name, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TypeError(f"{type(model).__name__} hides its model: give its module, and use fully_shard for ranks")
    reason = refused_parallelism(model)
    if reason:
        raise TypeError(f"{type(model).__name__} cannot be scored under {reason}")
    if generate and not hasattr(model, "generate"):
        raise TypeError(f"{type(model).__name__} has no generate(): give a transformers model, or pass generate=False")
    if device is not None:
        wanted, found = torch.device(device), computing_device(model)
        if wanted.type != found.type or wanted.index not in (None, found.index):
            raise ValueError(f"device={str(wanted)!r}, and the model is on {str(found)!r}: move it first")
    return model


def tokenizer_of(tokenizer: Any, model: Any, loaded: Any, input_mode: str) -> Any:
    """Return the tokenizer: as given, by its name, or the model's.

    Args:
        tokenizer: the argument.
        model: the model argument; a folder or a name has a tokenizer beside it.
        loaded: the loaded model.
        input_mode: tokens need none.

    Raises:
        ValueError: there is none, but the input is text.
    """
    if isinstance(tokenizer, str | os.PathLike):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer)
    if tokenizer is not None or input_mode == "tokens":
        return tokenizer
    if isinstance(model, str | os.PathLike):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model)
    if hasattr(loaded, "get_tokenizer"):
        return loaded.get_tokenizer()
    raise ValueError(f"input_mode={input_mode!r} makes tokens of text: pass tokenizer=, an object, a folder or a name")


def check_vocabulary(tokenizer: Any, model: Any) -> None:
    """Refuse a tokenizer with ids for which a model has no row of embeddings: a prompt with one would fail.

    Raises:
        ValueError: names the last of these ids.
    """
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(getattr(embedding, "weight", None), "shape", [None])[0]
    if rows is None or not hasattr(tokenizer, "get_vocab"):
        return
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= rows:
        raise ValueError(
            f"the tokenizer has the token {tokenizer.convert_ids_to_tokens(last)!r} with id {last}, and the model has "
            f"rows for 0 to {rows - 1}: call model.resize_token_embeddings({last + 1}) where tokens were added, or "
            "pass the model's own tokenizer"
        )


def pad_of(tokenizer: Any) -> int | None:
    """Return the id of a tokenizer's padding token; the end-of-sequence id, if it has none."""
    pad = getattr(tokenizer, "pad_token_id", None)
    return getattr(tokenizer, "eos_token_id", None) if pad is None else pad


def replay_of(arguments: dict[str, Any], model: nn.Module) -> str:
    """Return which experts a scorer follows: as passed, else the engine's, if it reads tokens of a model with routers.

    Whether a model has routers is read from its config.
    """
    if arguments["replay"] is not None:
        return str(arguments["replay"])
    follows = not arguments["generate"] and arguments["input_mode"] == "tokens" and has_experts(model)
    return "R3" if follows else "none"


def recorder_of(arguments: dict[str, Any], model: nn.Module) -> RouterReplay | None:
    """Return the ``RouterReplay`` that records the experts of an answer; ``None`` if no routes are written.

    Raises:
        ValueError: routes are requested from a dense model.
        UnsupportedRouterError: the model's routers cannot be recorded.
    """
    wanted = arguments["return_routed_experts"]
    if not arguments["generate"] or wanted is False:
        return None
    if not has_experts(model):
        if wanted:
            raise ValueError(f"return_routed_experts=True, and {type(model).__name__} has no experts by its config")
        return None
    try:
        return arguments["router_replay"] or RouterReplay.of(model)
    except UnsupportedRouterError as error:
        raise UnsupportedRouterError(
            f"{error}. To generate without routes, pass return_routed_experts=False"
        ) from error
