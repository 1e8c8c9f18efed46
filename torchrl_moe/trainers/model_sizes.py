"""``ModelSizes``: the size of a model, computed from its configuration; no weights are loaded or allocated."""

from __future__ import annotations

import copy
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrl_moe._compat_memory import peak_bytes, without_memory
from torchrl_moe.modules.backends.checkpoint import check_reachable
from torchrl_moe.modules.policies.adapters import LoraLayers, base_model, has_adapters
from torchrl_moe.modules.policies.scoring_model import ScoringModel, Selection
from torchrl_moe.trainers.config import ConfigError, ModelConfig
from torchrl_moe.trainers.policy_model import prepared

__all__ = ["ModelSizes", "activation_bytes", "model_config_of"]

KNOWN = {
    "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "allenai/OLMoE-1B-7B-0125-Instruct": "olmoe_1b_7b",
    "allenai/OLMoE-1B-7B-0125": "olmoe_1b_7b",
}
"""Hub models whose ``config.json`` is in the package, so that a plan needs no network."""
MODELS = Path(__file__).parent / "configs" / "models"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERT_WIDTHS = ("moe_intermediate_size", "intermediate_size")
TOP_KS = ("num_experts_per_tok", "moe_topk", "moe_k")
DENSE_FIRST = "first_k_dense_replace"
"""The config key of DeepSeek's families for the number of leading layers without experts."""


def model_config_of(source: str) -> Any:
    """Return the transformers configuration of a folder, a hub name, or a hub model that is known here.

    Raises:
        ConfigError: there is none, or the hub cannot be reached.

    >>> model_config_of("Qwen/Qwen3-30B-A3B").num_hidden_layers
    48
    """
    from transformers import AutoConfig

    kept = KNOWN.get(source)
    try:
        if not kept:
            check_reachable(source)
        return AutoConfig.from_pretrained(MODELS / f"{kept}.json" if kept else source)
    except (OSError, ValueError) as error:
        raise ConfigError.of(f"model.source={source}", error) from error


@dataclass(frozen=True, slots=True)
class _Settings:
    """A key for cached results: two are equal if the model and its training settings, written out, are."""

    described: str
    hf_config: Any = field(compare=False)
    model_config: ModelConfig = field(compare=False)

    @classmethod
    def of(cls, hf_config: Any, model_config: ModelConfig) -> _Settings:
        values = json.dumps(hf_config.to_dict(), sort_keys=True, default=str)
        attention = getattr(hf_config, "_attn_implementation", None)
        return cls(f"{type(hf_config)} {values} {attention} {model_config}", hf_config, model_config)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, as element counts, not bytes.

    Attributes:
        parameters: of the whole model, an adapter's too.
        trained: parameters that training changes.
        adapter: parameters of an adapter; 0 without one.
        adapted: parameters of the weights that an adapter adds to.
        layer: parameters of the largest decoder layer.
        outside: parameters outside the decoder layers: embedding, head, last norm.
        experts: parameters of all experts.
        largest: elements of the largest weight.
        hidden: size of a token's hidden state.
        expert_width: intermediate size of an expert.
        layers: number of decoder layers.
        top_k: experts per token; 0 for a dense model.
        num_experts: experts to choose from.
        kv: elements per token in the engine's KV cache, over all layers.
        kv_heads: the most GPUs of a replica that the KV cache can be split over; latent attention has 1.
    """

    parameters: int
    trained: int
    adapter: int
    adapted: int
    layer: int
    outside: int
    experts: int
    largest: int
    hidden: int
    expert_width: int
    layers: int
    top_k: int
    num_experts: int
    kv: int
    kv_heads: int

    @classmethod
    def of(cls, hf_config: Any, model_config: ModelConfig) -> ModelSizes:
        """Count; the result for equal arguments is kept.

        Args:
            hf_config: a transformers configuration.
            model_config: of the run: its adapter.
        """
        return cls._counted(_Settings.of(hf_config, model_config))

    @classmethod
    @lru_cache(maxsize=32)
    def _counted(cls, settings: _Settings) -> ModelSizes:
        hf_config, model_config = settings.hf_config, settings.model_config
        text = hf_config.get_text_config()
        with torch.device("meta"):
            model = prepared(_made(hf_config, torch.float32), _without_checkpointing(model_config), torch.float32)
        counts = {name: weight.numel() for name, weight in model.named_parameters()}
        layers = number_of_layers(text)
        by_layer = [sum(n for name, n in counts.items() if f"layers.{i}." in name) for i in range(layers)]
        adapter = sum(n for name, n in counts.items() if "lora_" in name)
        return cls(
            parameters=sum(counts.values()),
            trained=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
            adapter=adapter,
            adapted=_adapted(model),
            layer=max(by_layer),
            outside=sum(counts.values()) - sum(by_layer),
            experts=sum(n for name, n in counts.items() if ".experts." in name and "lora_" not in name),
            largest=max(counts.values()),
            hidden=int(text.hidden_size),
            expert_width=_first(text, EXPERT_WIDTHS),
            layers=layers,
            top_k=_first(text, TOP_KS),
            num_experts=_first(text, EXPERT_COUNTS),
            kv=layers * _kv_per_layer(text),
            kv_heads=_kv_heads(text),
        )

    @property
    def route_bytes(self) -> int:
        """Bytes of a token's recorded experts, as ``("routed_experts", "full")`` holds them."""
        return self.layers * self.top_k * (1 if self.num_experts <= 128 else 2)


def number_of_layers(text_config: Any) -> int:
    """Return the number of decoder layers."""
    return int(text_config.num_hidden_layers)


def activation_bytes(
    hf_config: Any, model_config: ModelConfig, sequences: int, tokens: int, dtype: torch.dtype, *, sharded: bool = False
) -> int:
    """Return the peak bytes that a forward and backward pass need besides weights and their gradients.

    Two models with the same layers are run on shapes alone (meta tensors), one a layer deeper than the other; each
    further layer is assumed to take the difference. Attention is the CPU's implementation which, like flash attention,
    keeps no attention scores. The result for equal arguments is kept.

    Args:
        hf_config: a transformers configuration.
        model_config: of the run: adapter and activation checkpointing.
        sequences: of a micro-batch.
        tokens: of each.
        dtype: of forward passes.
        sharded: whether weights are gathered in that dtype (FSDP2), instead of being cast where they are used.
    """
    return _activation_bytes(_Settings.of(hf_config, model_config), sequences, tokens, dtype, sharded)


@lru_cache(maxsize=64)
def _activation_bytes(settings: _Settings, sequences: int, tokens: int, dtype: torch.dtype, sharded: bool) -> int:
    hf_config, model_config = settings.hf_config, settings.model_config
    text = hf_config.get_text_config()
    layers = number_of_layers(text)
    # with a single layer the peak is elsewhere
    fewer = min(int(getattr(text, DENSE_FIRST, 0) or 0) + 2, layers)
    given = (model_config, sequences, tokens, dtype, sharded)
    least = _peak(_cut(hf_config, fewer), *given)
    if fewer == layers:
        return least
    return least + (layers - fewer) * (_peak(_cut(hf_config, fewer + 1), *given) - least)


def _peak(
    hf_config: Any, model_config: ModelConfig, sequences: int, tokens: int, dtype: torch.dtype, sharded: bool
) -> int:
    with without_memory():
        frozen = model_config.lora.rank > 0
        model = prepared(_made(hf_config, dtype if frozen or sharded else torch.float32), model_config, dtype)
        for weight in model.parameters():
            if sharded:
                weight.data = weight.data.to(dtype)  # as it is gathered
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)  # accumulated by earlier micro-batches
        autocast: AbstractContextManager[Any] = nullcontext()
        if not sharded and dtype != torch.float32:
            autocast = torch.autocast("cpu", dtype)
        return peak_bytes(lambda: _step(model, sequences, tokens, autocast))


def _step(model: nn.Module, sequences: int, tokens: int, precision: AbstractContextManager[Any]) -> None:
    """Run a forward and backward pass as the trainer does: scores of all tokens, no logits."""
    scoring = ScoringModel(model)
    scoring.splits = True  # the check needs real values
    ids = torch.zeros(sequences, tokens, dtype=torch.long)
    inputs = {"input_ids": ids, "position_ids": torch.arange(tokens).expand(sequences, -1)}
    rows = torch.arange(ids.numel())
    selection = Selection(rows=rows, tokens=ids.flatten(), temperature=1.0, entropy=True)
    with precision:
        log_probs, _, _ = scoring(inputs, selection)
    log_probs.sum().backward()


def _made(hf_config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), dtype=dtype)


def _cut(hf_config: Any, layers: int) -> Any:
    """Return the configuration of a model of fewer layers."""
    cut = copy.deepcopy(hf_config)
    text = cut.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    return cut


def _without_checkpointing(config: ModelConfig) -> ModelConfig:
    plain = copy.copy(config)
    plain.activation_checkpointing = False
    return plain


def _adapted(model: Any) -> int:
    if not has_adapters(model):
        return 0
    base = base_model(model)
    lora = LoraLayers(base)
    weights = dict(lora.own_weights(base.state_dict()))
    return sum(weights[key].numel() for key in lora.in_use())


def _kv_heads(text: Any) -> int:
    if getattr(text, "kv_lora_rank", None):
        return 1
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _kv_per_layer(text: Any) -> int:
    """Return the number of elements that a layer's cache holds per token."""
    latent = getattr(text, "kv_lora_rank", None)
    if latent:  # DeepSeek's latent attention: one vector, and the rotated part of the keys
        return int(latent) + int(text.qk_rope_head_dim)
    heads = _kv_heads(text)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * heads * width


def _first(text: Any, names: tuple[str, ...]) -> int:
    return next((int(getattr(text, name)) for name in names if getattr(text, name, None)), 0)
