"""What differs between the releases of transformers that may be installed (5.18 to 5.24); it is not imported here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn


def standard_names(generate_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``generate_kwargs`` by TorchRL's common names, checked as its own wrappers check them (0.14).

    Its public wrappers do so in their constructors only.
    """
    from torchrl.modules.llm.policies import LLMWrapperBase

    standard: dict[str, Any] = LLMWrapperBase._standardize_generate_kwargs(generate_kwargs)
    return standard


def chat_template_named(name: str) -> str:
    """Return one of TorchRL's chat templates, or one that was added with its ``add_chat_template`` (0.14).

    Its public names only render a ``History``, which has no field for all that a message may have.
    """
    from torchrl.data.llm.history import _CHAT_TEMPLATES

    if name not in _CHAT_TEMPLATES:
        raise ValueError(f"chat_template_name={name!r} must be one of TorchRL's: {', '.join(sorted(_CHAT_TEMPLATES))}")
    template: str = _CHAT_TEMPLATES[name]
    return template


def sample_by(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run transformers' own loop over tokens (5.18 to 5.24), from inside of ``generate(custom_generate=...)``.

    Only a logits processor that comes after all others sees what each step draws from, and it can be added only here.
    """
    return model._sample(*args, **kwargs)


def cache_argument(arguments: Collection[str]) -> str:
    """Return how a model's forward pass calls the cache of keys and values.

    It is ``cache`` from 5.24 on, where the older name warns, and remote code may keep that one.

    >>> cache_argument(["input_ids", "cache"]), cache_argument(["input_ids", "past_key_values"])
    ('cache', 'past_key_values')
    """
    return "cache" if "cache" in arguments else "past_key_values"


def one_shape_of_experts(model: Any) -> None:
    """Have a model multiply each token by each of its experts alone: products of one shape, in whatever batch.

    By default an expert's tokens are one product, whose shape, and with it the last bits, depends on all other tokens.
    """
    setter = getattr(model, "set_experts_implementation", None)
    if setter is None or not model._can_set_experts_implementation():
        raise ValueError(
            f"{type(model).__name__} computes its experts in code of its own: their products have another shape for "
            "each batch, so parity='exact' is out of reach. Leave parity out"
        )
    setter("batched_mm")


def checkpoint_activations(model: Any, **arguments: Any) -> None:
    """Have a model compute its activations again in the backward pass.

    The method has another name from 5.23 on, where the older one warns.
    """
    arguments = {"use_reentrant": False, **arguments}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def lowered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a model's weights to ``dtype`` as ``from_pretrained(dtype=...)`` does, and return it.

    ``model.to(dtype)`` would round what transformers keeps in float32 too: correction biases, from 5.24 on many
    families' routers, and buffers that no checkpoint has, such as the frequencies of rotary embeddings.
    """
    if dtype not in (torch.bfloat16, torch.float16) or not hasattr(model, "_keep_in_fp32_modules_strict"):
        return model.to(dtype)
    # keep_vars gives the parameters themselves, whose data is replaced: optimizers and hooks stay attached
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not stays_float32(model, name, dtype):
            tensor.data = tensor.data.to(dtype)
    return model


def restore_frequencies(model: nn.Module) -> None:
    """Compute the frequencies of rotary embeddings again where ``model.bfloat16()`` has rounded them, in place.

    No checkpoint has them, and an engine computes them in float32: long prompts would be scored as by another model.
    """
    for module in model.modules():
        own, config = dict(module.named_buffers(recurse=False)), getattr(module, "config", None)
        # made again by the module's own constructor, which knows its kind of scaling
        rounded = {name for name, one in own.items() if name.endswith("inv_freq") and one.dtype.itemsize == 2}
        if rounded and config is not None:
            exact = dict(type(module)(config).named_buffers(recurse=False))
            for name in rounded & exact.keys():
                setattr(module, name, exact[name].to(own[name].device))


def stays_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers keeps a weight of a model in float32 where others are in ``dtype``."""
    # transformers has two lists: one for all narrow types, one for float16 alone, whose range is small
    kept = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype == torch.float16:
        kept |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    return dtype in (torch.bfloat16, torch.float16) and any(f".{part}." in f".{name}." for part in kept)


INCOMPLETE = "config.json is of another model, or the weights are incomplete: write or download them again"


def load_whole(source: object, load: Callable[..., Any], **arguments: Any) -> Any:
    """Return what ``from_pretrained`` loads, if all of it was stored: transformers makes the rest up, at random."""
    # Other shapes are an error of transformers, missing tensors only a warning.
    try:
        model, report = load(source, output_loading_info=True, **arguments)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(f"the weights of {source} have other shapes than the model: {INCOMPLETE}") from error
    check_whole(source, report)
    return model


def check_whole(source: object, report: Mapping[str, Any]) -> None:
    """Refuse a model that was loaded in part, by transformers' report.

    >>> check_whole("my/moe", {"missing_keys": {"lm_head.weight"}})
    Traceback (most recent call last):
    ValueError: the weights of my/moe lack 1 tensor(s), such as lm_head.weight: config.json is of another model, or ...
    """
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the weights of {source} lack {len(missing)} tensor(s), such as {missing[0]}: {INCOMPLETE}")
