"""The measured sizes: layers of Qwen3-30B-A3B, and tiny ones that show on a CPU that everything runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["LARGE", "TINY", "Sizes", "make_model"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model, and of a batch: ``sequences`` of ``length`` tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    vocabulary: int
    sequences: int
    length: int
    matmul: int
    """Rows of the square matrices that measure the device's peak rates."""
    repeats: int

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return self.sequences * self.length

    @property
    def body_flops(self) -> float:
        """FLOPs of a forward and backward pass of the layers: 6 per active weight and token, and causal attention."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        weights = attention + self.hidden * (self.experts + 3 * self.top_k * self.expert_width)
        pairs = 6 * self.heads * self.head_dim * self.length  # half of all pairs, twice: scores and values
        return float(self.layers * self.tokens * (6 * weights + pairs))

    @property
    def head_flops(self) -> float:
        """FLOPs of the head, forward and backward, with the products of the forward pass recomputed."""
        return 8.0 * self.tokens * self.hidden * self.vocabulary


LARGE = Sizes(
    layers=4,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    experts=128,
    top_k=8,
    expert_width=768,
    vocabulary=151_936,
    sequences=8,
    length=2048,
    matmul=8192,
    repeats=5,
)
TINY = Sizes(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=8,
    top_k=2,
    expert_width=32,
    vocabulary=512,
    sequences=2,
    length=24,
    matmul=64,
    repeats=1,
)


def make_model(sizes: Sizes, device: torch.device) -> nn.Module:
    """Return a Qwen3-MoE in bfloat16 whose experts run with ``grouped_mm``; its weights are random."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        moe_intermediate_size=sizes.expert_width,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):  # routers that prefer some experts
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.train()
