"""A language model's head as a sum of matrix products: a linear layer, alone or with LoRA adapters.

peft's layers are recognised by their attributes; peft is not imported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchrl_moe.ops.log_probs import LogitTransform

__all__ = ["linear_parts", "logit_transform", "obstacle"]


def obstacle(module: nn.Module) -> str:
    """Return why a head is not a sum of matrix products; empty if it is one."""
    head = _active(module)
    linear = _base(head)
    # tensor parallelism replaces the forward of a linear layer whose weight is a DTensor: that is supported
    shared = head is linear and hasattr(getattr(linear, "weight", None), "device_mesh")
    if not shared and ("forward" in head.__dict__ or "forward" in linear.__dict__):
        return "its forward is replaced, for example by a hook that moves its weights"
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        return f"it ends in {type(linear).__name__}, which is not a linear layer"
    for name in _adapters(head):
        if name in getattr(head, "lora_variant", {}):
            return f"its adapter {name!r} is {type(head.lora_variant[name]).__name__}, not plain LoRA"
        if head.lora_B[name].bias is not None:
            return f"its adapter {name!r} has a bias"
    return ""


def linear_parts(module: nn.Module, hidden: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Return inputs ``[N, H_i]``, weights ``[V, H_i]`` and a bias whose products add up to ``head(hidden)``.

    Under tensor parallelism weight and bias are DTensors.

    A LoRA adapter ``scale * B A`` is the part with input ``scale * A hidden`` and weight ``B``: the product ``B A``,
    which is as large as the head, is never computed, and a frozen head gets no gradient.
    """
    head = _active(module)
    linear = _base(head)
    if getattr(head, "merged", False) and head.disable_adapters:
        head.unmerge()  # as its own forward does
    hiddens, weights = [hidden], [linear.weight]
    for name in _adapters(head):
        down, up = head.lora_A[name], head.lora_B[name]
        narrow = down(head.lora_dropout[name](hidden.to(down.weight.dtype)))
        hiddens.append(narrow * head.scaling[name])
        weights.append(up.weight)
    return hiddens, weights, linear.bias


def logit_transform(config: Any) -> LogitTransform:
    """Return the transform that a model applies to its head's output, from the known config keys of transformers."""
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= _positive(config, name) or 1.0
    scale /= _positive(config, "logits_scaling") or 1.0
    return LogitTransform(scale=scale, soft_cap=_positive(config, "final_logit_softcapping"))


def _positive(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None


def _active(head: Any) -> Any:
    """Return the module that runs: if peft trains the whole head, its copy, or the original if that is switched off."""
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    names = [] if head.disable_adapters else [name for name in head.active_adapters if name in copies]
    return copies[names[0]] if names else head.original_module


def _base(head: Any) -> Any:
    return getattr(head, "base_layer", head) if hasattr(head, "lora_A") else head


def _adapters(head: Any) -> list[str]:
    """Return the LoRA adapters that currently add to the head's output."""
    if not hasattr(head, "lora_A") or head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]
