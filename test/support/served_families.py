"""The families of ``families.py`` in vLLM on CPU: which serve, which of them follow recorded experts, and why not.

Sizes are those that vLLM's kernels take. A reason is what vLLM itself says, or what we say of a router.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from support.families import FAMILIES, REFUSED, build
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.testing.tiny_moe import TINY_MOE_FAMILIES

SIZES: Mapping[str, Any] = {
    **{name: 32 for name in ("intermediate_size", "moe_intermediate_size", "head_dim")},
    **{f"{name}_token_id": getattr(ByteTokenizer(), f"{name}_token_id") for name in ("pad", "bos", "eos")},
    **{"vocab_size": 259, "hidden_size": 128, "max_position_embeddings": 2048},
}
LATENT: Mapping[str, Any] = {  # what vLLM's MLA kernels on CPU take
    name: size
    for name, size in TINY_MOE_FAMILIES["deepseek_v3"].config.items()
    if name.endswith(("lora_rank", "head_dim", "key_value_heads"))
}

Outcome = Literal["exact", "rounded", "refused", "unserved"]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What vLLM makes of a family."""

    outcome: Outcome = "exact"
    """"exact": follows, in float32; "rounded": follows, in bfloat16, since vLLM has a kernel of it for no other dtype;
    "refused": serves, and cannot follow; "unserved": does not start, or dies under the first request."""

    why: str = ""  # a part of the message, as a pattern, of what is refused or unserved
    live: str = ""  # why it computes something else than transformers where it follows nothing, if it does
    config: Mapping[str, Any] = field(default_factory=dict)  # over SIZES
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the engine
    needs_amx: bool = False  # only where the CPU has AMX is the outcome this one


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
    dtype = "bfloat16" if SERVED[name].outcome == "rounded" else "float32"
    return {"kv_cache_memory_bytes": 1 << 25, "dtype": dtype, **SERVED[name].arguments}


EXTERNAL = "TransformersMoERunner takes experts that transformers' code has chosen"
NO_SIGMOID = "AssertionError"  # vLLM's router for CPUs scores by sigmoid in groups of experts alone
# where the CPU has AMX, vLLM packs a convolution's weight, and then asks for its width; else it lacks Jamba's kernel,
# and serves LFM2, but its attention is far from that of transformers
PACKED = "Dimension out of range|selective_scan_fwd"
SPARSE = "Sparse Attention is not supported on CPU"
LINEAR = "linear_attention. does not dispatch"
NO_VISION = "failed to be inspected"  # its file in vLLM imports torchvision, or a kernel, that is not here
MLA = "is not supported by MLA"  # from transformers, vLLM takes other sizes than 512 + 64

FULL = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}  # vLLM captures where one is full
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
CORRECTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1}  # keys of vLLM's
TIED = {**FULL, "tie_word_embeddings": True}
HALF = {"dtype": "bfloat16"}


def exact(live: str = "", **config: Any) -> Served:
    return Served(config=config, live=live)


def rounded(**config: Any) -> Served:
    return Served(outcome="rounded", config=config)


def refused(why: str, live: str = "", **config: Any) -> Served:
    return Served(outcome="refused", why=why, live=live, config=config)


def unserved(why: str, arguments: Mapping[str, Any] | None = None, **config: Any) -> Served:
    return Served(outcome="unserved", why=why, config=config, arguments=arguments or {})


SERVED: Mapping[str, Served] = {
    "afmoe": exact(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1, **FULL),
    "aria": unserved("size of tensor a .32. must match the size of tensor b .64."),
    "axk1": unserved("weights were not initialized from checkpoint"),
    "axk2": unserved(MLA, index_head_dim=96),
    "axk2 (groups)": unserved(MLA, index_head_dim=96),
    "bailing_hybrid": unserved(LINEAR),
    "beam": unserved("'NoneType' object is not subscriptable"),
    "cohere2_moe": exact(**TIED),
    "cohere2_moe (sigmoid)": exact(**TIED),
    "dbrx": unserved("w13_weight"),
    "deepseek_v2": exact(n_group=1, topk_group=1, topk_method="greedy"),
    "deepseek_v2 (group_limited)": exact(),
    "deepseek_v32": unserved(SPARSE),
    "deepseek_v4": unserved("`mlp_layer_types` entries"),  # vLLM has a config of its own
    "doge": unserved("No supported MoE router found"),
    "dots1": exact(),
    "dots3_note": unserved(NO_VISION, index_head_dim=96, head_dim=96),
    "ernie4_5_moe": exact(live="vLLM's router for CPUs adds no correction bias where it scores by softmax"),
    "exaone_moe": exact(sliding_window=64, sliding_windows=[None, 64, None], **FULL),
    "flex_olmo": exact(),
    "flint": unserved("expected scalar type BFloat16"),
    "gemma4": exact(vocab_size_per_layer_input=259, **FULL),
    "glm4_moe": exact(),
    "glm4_moe_lite": exact(head_dim=64, rms_norm_eps=1e-6, **CORRECTED),
    "glm4v_moe": unserved(NO_VISION),
    "glm5_next": unserved(NO_VISION, qk_rope_head_dim=0),
    "glm_moe_dsa": unserved(SPARSE),
    "gpt_oss": rounded(),
    "granitemoe": exact(),
    "granitemoe_swa": rounded(),
    "granitemoehybrid": rounded(mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16),
    "granitemoeshared": exact(),
    "hunyuan_v1_moe": refused(EXTERNAL),
    "hy_v3": exact(expert_hidden_dim=32, first_k_dense_replace=1, route_norm=True, qk_norm=True),
    "hy_v4": unserved(SPARSE),
    "inkling": unserved("tokenizer is missing special tokens"),
    "inkling2": unserved("w13_weight_weight"),
    "jamba": unserved(PACKED, HALF),
    "jetmoe": unserved("No supported MoE router found"),
    "kimi_linear": unserved("No module named 'cutlass'|_lib_fn_wrapper. object has no attribute", HALF),
    "kolibri1": refused(EXTERNAL, **FULL),
    "laguna": unserved(NO_SIGMOID),
    "lfm2_moe": replace(unserved(PACKED, HALF, conv_L_cache=4), needs_amx=True),
    "llama4": exact(num_experts_per_tok=1, no_rope_layers=[1, 0, 1]),
    "longcat_flash": unserved("LongcatFlashConfig' object has no attribute"),
    "mellum": exact(),
    "mimo_v2_flash": unserved("MiMoV2FlashConfig' object has no attribute"),
    "minimax": unserved(LINEAR),
    "minimax_m2": unserved(NO_SIGMOID, rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True),
    "minimax_m3_vl": unserved(NO_SIGMOID),
    "mistral4": unserved(MLA, head_dim=96),
    "mistral_large4": unserved("ImportError"),
    "nemotron_h": unserved("is_act_and_mul=False is supported only for CUDA"),
    "nllb-moe": unserved("position_ids not found"),
    "phimoe": unserved("too many values to unpack"),
    "qwen2_moe": exact(),
    "qwen3_5_moe": unserved(NO_VISION, HALF, **DELTA),
    "qwen3_next": rounded(**DELTA),
    "qwen3_vl_moe": unserved(NO_VISION),
    "qwen4_exp": unserved(NO_VISION, indexer_head_dim=32, indexer_budget=1024),
    "solar_open": exact(),
    "switch_transformers": unserved("position_ids not found"),
    "zaya": refused(EXTERNAL, live="its log-probs are off by 0.1 and more: what else vLLM computes in another way"),
}
"""All but those that ``make test`` proves."""
