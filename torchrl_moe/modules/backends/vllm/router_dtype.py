"""Routers in float32 inside an engine of a narrower dtype, and what dtype a worker holds each tensor in.

vLLM has a config key for this, ``moe_router_dtype``, and it is not enough: most families never read it, and DeepSeek's
code (0.32 and 0.33) makes the *logits* float32 and leaves the weights in the model's dtype, so a trained router is
rounded as it is loaded. All these families make their router from one layer, ``GateLinear``, which vLLM lets a plug-in
replace.

Imported in vLLM's worker processes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from torchrl_moe import _compat
from torchrl_moe.modules.backends.vllm.engine_args import ROUTER_DTYPE

LAYER = re.compile(r"^(?:.*\.)?layers\.\d+(?=\.)")
EXPERT = re.compile(r"\.experts\.\d+\..*")


class RouterGate(GateLinear):
    """vLLM's router layer, with weights and logits in float32 if the engine was started with ``router_dtype``."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, **kwargs: Any) -> None:
        self.is_float32 = get_current_vllm_config().additional_config.get(ROUTER_DTYPE) == "float32"
        if self.is_float32:
            kwargs |= {"params_dtype": torch.float32, "out_dtype": torch.float32}
        super().__init__(input_size, output_size, bias, **kwargs)

    def set_out_dtype(self, out_dtype: torch.dtype) -> None:
        """Set the dtype of the logits, as a model's code does late; float32 ones stay so."""
        if not self.is_float32:
            super().set_out_dtype(out_dtype)


def register() -> None:
    """Have vLLM make its routers from :class:`RouterGate`, unless a platform has put its own layer there."""
    op_registry_oot.setdefault(GateLinear.__name__, RouterGate)


def narrow_routers(model: nn.Module) -> list[str]:
    """Return the decoder layers whose router does not compute in float32, by name.

    Their family's code makes it otherwise; or its kernel ranks experts by itself, and was chosen for narrower logits.
    """
    kept, inside, layers = set(), set(), {}
    for name, module in model.named_modules():
        match = LAYER.match(name)
        if match is None:
            continue
        layers[match[0]] = int(match[0].rpartition(".")[2])
        weight = getattr(module, "weight", None)
        is_router = isinstance(module, GateLinear) or (name.endswith(("gate", "router")) and "shared" not in name)
        if is_router and isinstance(weight, torch.Tensor) and weight.dtype == torch.float32:
            kept.add(match[0])
        ranks = isinstance(module, MoERunner) and module._quant_method.is_monolithic
        if ranks and module.moe_config.router_logits_dtype != torch.float32:
            inside.add(match[0])
    routed = set(_compat.router_layer_ids(model))
    return [name for name, layer in layers.items() if layer in routed and (name not in kept or name in inside)]


def held_dtypes(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return torch's name of the dtype in which a model holds each tensor of its checkpoint, as far as names tell.

    vLLM stacks some tensors and renames others, each family in its own way; what is not found is left out.
    """
    held = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    of_experts: dict[str, set[torch.dtype]] = {}
    for name, dtype in held.items():
        before, found, _ = name.partition(".experts.")
        if found:
            of_experts.setdefault(before, set()).add(dtype)
    stacked: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    into = {part: whole for whole, parts in stacked.items() for part in parts}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    dtypes = {}
    for name in names:
        own = name if mapper is None else mapper.map_name(name)
        if own is None:  # not loaded at all
            continue
        own = ".".join(into.get(part, part) for part in own.split(".")) if own not in held else own
        if own in held:
            dtypes[name] = str(held[own]).removeprefix("torch.")
        elif EXPERT.search(own) and len(kinds := of_experts.get(EXPERT.sub("", own), set())) == 1:
            dtypes[name] = str(next(iter(kinds))).removeprefix("torch.")
    return dtypes
