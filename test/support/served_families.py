"""The families of ``families.py`` in vLLM on CPU: which serve, which of them follow recorded experts, and why not.

Sizes are those that vLLM's kernels take. A reason is what vLLM itself says, or what we say of a router.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from support.families import FAMILIES, REFUSED, build
from torchrl_moe.testing import ByteTokenizer

SIZES: Mapping[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    **{f"{name}_token_id": getattr(ByteTokenizer(), f"{name}_token_id") for name in ("pad", "bos", "eos")},
}
LATENT: Mapping[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # vLLM's MLA kernels on CPU take 512 + 64 and nothing else
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}

Outcome = Literal["exact", "rounded", "refused", "wrong", "unserved"]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What vLLM makes of a family."""

    outcome: Outcome = "exact"
    """"exact": follows, in float32; "rounded": follows, in bfloat16, since vLLM has a kernel of it for no other dtype;
    "refused": serves, and cannot follow; "wrong": computes something else than transformers, whatever it follows;
    "unserved": does not start, or dies."""

    why: str = ""
    """A part of the message, of what is refused or unserved."""

    live: str = ""
    """Why its own routers choose others than transformers', where they do."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Over :data:`SIZES`."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine."""


def build_served(name: str) -> PreTrainedModel:
    """A tiny model of a family, of sizes that vLLM takes."""
    given = FAMILIES[name].config if name in FAMILIES else REFUSED[name]["config"]
    small = {key: 32 for key in ("shared_expert_intermediate_size", "shared_intermediate_size") if key in given}
    latent = LATENT if "kv_lora_rank" in given else {}
    return build(name, **{**SIZES, **small, **latent, **SERVED[name].config})


def save_served(name: str, folder: Path) -> PreTrainedModel:
    """Save such a model and its tokenizer, and return it."""
    model = build_served(name)
    model.save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return model


def engine_arguments(name: str) -> dict[str, Any]:
    """Of an engine that serves a family."""
    given = FAMILIES[name].config if name in FAMILIES else REFUSED[name]["config"]
    latent: dict[str, Any] = {"compilation_config": {"custom_ops": ["none"]}} if "kv_lora_rank" in given else {}
    dtype = "bfloat16" if SERVED[name].outcome == "rounded" else "float32"
    return {"kv_cache_memory_bytes": 1 << 25, "dtype": dtype, **latent, **SERVED[name].arguments}


# Reasons, in vLLM's words or ours.
EXTERNAL = "TransformersMoERunner takes experts that transformers' code has chosen"
NO_SIGMOID = 'AssertionError'  # CPURouter scores by sigmoid in groups alone
NO_KERNEL = "causal_conv1d_fwd_kernel_impl"
PACKED_CONVOLUTION = "Dimension out of range"  # vLLM packs the convolution's weight, and then asks for its width
FULL = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}  # without one, vLLM captures nothing
DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
CORRECTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # keys of vLLM's

SERVED: Mapping[str, Served] = {
    "afmoe": Served(config=FULL),
    "bailing_hybrid": Served(outcome="unserved", why="linear_attention"),
    "dbrx": Served(outcome="unserved", why="w13_weight"),
    "deepseek_v2": Served(config={"n_group": 1, "topk_group": 1, "topk_method": "greedy"}),
    "dots1": Served(),
    "ernie4_5_moe": Served(live="vLLM's router for CPUs has no correction bias where it scores by softmax"),
    "flex_olmo": Served(),
    "gemma4": Served(config={"vocab_size_per_layer_input": 259, **FULL}),
    "glm4_moe": Served(),
    "gpt_oss": Served(outcome="rounded"),
    "granitemoe": Served(),
    "granitemoehybrid": Served(
        outcome="rounded", config={"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
    ),
    "granitemoeshared": Served(),
    "hunyuan_v1_moe": Served(outcome="refused", why=EXTERNAL),
    "jamba": Served(outcome="unserved", why=PACKED_CONVOLUTION, arguments={"dtype": "bfloat16"}),
    "laguna": Served(outcome="unserved", why=NO_SIGMOID),
    "lfm2_moe": Served(
        outcome="unserved", why=PACKED_CONVOLUTION, config={"conv_L_cache": 4}, arguments={"dtype": "bfloat16"}
    ),
    "mellum": Served(),
    "qwen2_moe": Served(),
}
