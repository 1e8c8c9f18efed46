"""The configs of ``families.py``: keys over its ``SMALL``, and what the page's table says of a family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

E, LOCAL, ROUTED = {"num_experts": 8}, {"num_local_experts": 8}, {"n_routed_experts": 8}
GROUPS = {"n_group": 4, "topk_group": 2}
SHARED = {"shared_expert_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
SPARSE_LATENT = {**LATENT, **INDEXER}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SLIDING = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
DELTA = {
    **LINEAR,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
KIMI = {
    **LINEAR,
    **LATENT,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "num_expert_group": 4,
    "topk_group": 2,
    "num_experts_per_token": 3,
}
INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}

# Ways of leaving out a layer's experts; the first layer here, unless said otherwise.
TYPES = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
FIRST = {"first_k_dense_replace": 1}


def by_types(formula: str, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"formula": formula, "config": {**config, **TYPES}, "layers": (1, 2), "dense": "mlp_layer_types", **more}


def by_first(formula: str, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "formula": formula,
        "config": {**config, **FIRST},
        "layers": (1, 2),
        "dense": "first_k_dense_replace",
        **more,
    }


def by_list(formula: str, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    config = {**config, "mlp_only_layers": [0]}
    return {"formula": formula, "config": config, "layers": (1, 2), "dense": "mlp_only_layers", **more}


def by_count(formula: str, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    config = {**config, "num_dense_layers": 1}
    return {"formula": formula, "config": config, "layers": (1, 2), "dense": "num_dense_layers", **more}


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": by_count("sigmoid_normalised", E),
    "aria": {
        "formula": "softmax_of_chosen",
        "model_type": "aria_text",
        "config": {"moe_num_experts": 8, "moe_topk": 3},
        "notes": "text model",
    },
    "axk1": by_types("sigmoid_normalised", {**ROUTED, **LATENT, **GROUPS}),
    "axk2": by_types("sigmoid_normalised", {**ROUTED, **SPARSE_LATENT, "gated_norm_rank": 8}),
    "axk2 (groups)": by_types("sigmoid_normalised", {**ROUTED, **SPARSE_LATENT, **GROUPS, "gated_norm_rank": 8}),
    "bailing_hybrid": by_first("sigmoid_normalised", {**E, **KIMI, **TYPES}),
    "beam": by_types("sigmoid_normalised", {**E, **GROUPS, **SLIDING}),
    "cohere2_moe": by_types("softmax_of_chosen", {**E, "num_shared_experts": 1}),
    "cohere2_moe (sigmoid)": by_types("sigmoid_normalised", {**E, "expert_selection_fn": "sigmoid"}),
    "dbrx": {
        "formula": "softmax_normalised",
        "config": {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 3, "hidden_size": 32},
        },
        "notes": "the block chooses, not its router",
    },
    "deepseek_v2": by_first("softmax", {**ROUTED, **LATENT, "routed_scaling_factor": 1.5}),
    "deepseek_v2 (group_limited)": by_first(
        "softmax", {**ROUTED, **LATENT, **GROUPS, "topk_method": "group_limited_greedy"}, notes="groups are opened"
    ),
    "deepseek_v3": by_first("sigmoid_normalised", {**ROUTED, **LATENT, **GROUPS}),
    "deepseek_v32": by_types("sigmoid_normalised", {**ROUTED, **SPARSE_LATENT, **GROUPS}),
    "deepseek_v4": {
        "formula": "sqrtsoftplus_normalised",
        "config": {
            **ROUTED,
            **INDEXER,
            "head_dim": 16,
            "qk_rope_head_dim": 8,
            "num_key_value_heads": 1,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "hc_mult": 2,
            "layer_types": ["compressed_sparse_attention", *["heavily_compressed_attention"] * 2],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
        },
        "layers": (1, 2),
        "dense": "mlp_layer_types",
        "notes": "hash layers choose by token: they have no routes",
    },
    "dots1": by_first("sigmoid_normalised", {**ROUTED, **GROUPS, "n_shared_experts": 1, "norm_topk_prob": True}),
    "dots3_note": by_types(
        "sigmoid_normalised",
        {
            **ROUTED,
            **SPARSE_LATENT,
            **GROUPS,
            "head_dim": 16,
            "shared_experts_intermediate_size": 16,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "per_layer_config": {},
        },
        model_type="dots3_note_text",
        notes="text model",
    ),
    "ernie4_5_moe": {
        "formula": "softmax_normalised",
        "config": {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
        "layers": (1, 2),
        "dense": "moe_layer_start_index",
    },
    "exaone_moe": by_types("sigmoid_normalised", {**E, **GROUPS}),
    "flex_olmo": {"formula": "softmax", "config": E},
    "flint": by_list("sigmoid_normalised", {**E, **SHARED}),
    "gemma4": {
        "formula": "gemma",
        "model_type": "gemma4_text",
        "config": {
            **E,
            **SLIDING,
            "top_k_experts": 3,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "per_layer_config": {},
        },
        "notes": "text model; a dense MLP beside the experts",
    },
    "glm4_moe": by_first("sigmoid_normalised", {**ROUTED, **GROUPS}),
    "glm4_moe_lite": by_types("sigmoid_normalised", {**ROUTED, **LATENT, **GROUPS}),
    "glm4v_moe": by_first(
        "sigmoid_normalised",
        {
            **ROUTED,
            **GROUPS,
            "head_dim": 16,
            "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 0.5},
        },
        model_class="Glm4vMoeForConditionalGeneration",
        notes="text only",
    ),
    "glm5_next": by_types(
        "sigmoid_normalised",
        {
            **ROUTED,
            **SPARSE_LATENT,
            **GROUPS,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "hc_mult": 2,
            "index_kpool": 2,
            "qk_rope_head_dim": 0,
        },
        model_class="Glm5NextForConditionalGeneration",
        notes="text only",
    ),
    "glm_moe_dsa": by_types("sigmoid_normalised", {**ROUTED, **SPARSE_LATENT, **GROUPS}),
    "gpt_oss": {"formula": "softmax_of_chosen", "config": LOCAL},
    "granitemoe": {"formula": "softmax_of_chosen", "config": LOCAL},
    "granitemoe_swa": {"formula": "softmax_of_chosen", "config": {**LOCAL, "shared_intermediate_size": 16}},
    "granitemoehybrid": {
        "formula": "softmax_of_chosen",
        "config": {
            **LOCAL,
            **LINEAR,
            "shared_intermediate_size": 16,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_expand": 2,
        },
    },
    "granitemoeshared": {"formula": "softmax_of_chosen", "config": {**LOCAL, "shared_intermediate_size": 16}},
    "hunyuan_v1_moe": {"formula": "softmax_normalised", "config": {**E, "moe_topk": 3}},
    "hy_v3": by_types("sigmoid_normalised", E),
    "hy_v4": by_types("sigmoid_normalised", {**ROUTED, **SPARSE_LATENT, **GROUPS, "hc_mult": 2}),
    "hy_v4_vl": by_types(
        "sigmoid_normalised",
        {**ROUTED, **SPARSE_LATENT, **GROUPS, **MROPE, "hc_mult": 2},
        model_class="HYV4VLForConditionalGeneration",
        notes="text only",
    ),
    "inkling": by_types(
        "inkling",
        {**ROUTED, **INKLING, "n_shared_experts": 2, "logits_mup_width_multiplier": 1.0},
        model_type="inkling_text",
        notes="text model; shared experts are weighted beside the chosen",
    ),
    "inkling2": {
        "formula": "sigmoid_normalised",
        "model_type": "inkling2_text",
        "config": {**ROUTED, **INKLING, "unpadded_vocab_size": 64, "n_layers_per_attn_res_block": 2},
        "notes": "text model",
    },
    "jamba": {
        "formula": "softmax",
        "config": {
            **E,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        "layers": (1,),
        "dense": "expert_layer_period",
    },
    "kimi_linear": by_types("sigmoid_normalised", {**E, **KIMI}),
    "kolibri1": {"formula": "sigmoid", "config": {**LOCAL, **SHARED}},
    "laguna": by_types(
        "sigmoid_capped",
        {**E, **SHARED, "num_attention_heads_per_layer": [4, 4, 4], "moe_router_logit_softcapping": 2.0},
    ),
    "lara_mini": {
        "formula": "softmax_normalised",
        "config": {**E, **DELTA, **SHARED, "layer_types": ["linear_attention", "full_attention", "sliding_attention"]},
    },
    "lfm2_moe": by_count("sigmoid_eps", {**E, "layer_types": ["conv", "full_attention", "conv"]}),
    "llama4": {
        "formula": "llama",
        "model_type": "llama4_text",
        "config": {**LOCAL, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 2},
        "layers": (1,),
        "dense": "moe_layers",
        "notes": "text model; every expert runs, on inputs times 0 if not chosen",
    },
    "mellum": by_types("softmax_normalised", {**LOCAL, **SLIDING}),
    "mimo_v2_flash": by_types("sigmoid_normalised", {**ROUTED, **GROUPS, **SLIDING, "v_head_dim": 8}),
    "minimax": {"formula": "softmax_normalised", "config": {**LOCAL, **LINEAR, "block_size": 4}},
    "minimax_m2": {"formula": "sigmoid_normalised", "config": LOCAL},
    "minimax_m3_vl": by_types(
        "sigmoid_normalised",
        {**LOCAL, "shared_intermediate_size": 16, "dense_intermediate_size": 32, "rotary_dim": 4},
        model_type="minimax_m3_vl_text",
        notes="text model",
    ),
    "mistral4": by_first(
        "softmax_normalised", {**ROUTED, **LATENT, **GROUPS, "head_dim": 16}, model_class="Mistral4ForCausalLM"
    ),
    "mistral_large4": by_first(
        "softmax_normalised",
        {**ROUTED, **SPARSE_LATENT, **GROUPS},
        model_class="MistralLarge4ForConditionalGeneration",
        notes="text only",
    ),
    "mixtral": {"formula": "softmax_normalised", "config": LOCAL},
    "nemotron_h": {
        "formula": "sigmoid_normalised",
        "config": {
            **ROUTED,
            **GROUPS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_shared_expert_intermediate_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "num_hidden_layers": 4,
        },
        "layers": (1, 3),
        "dense": "layers_block_type",
    },
    "olmoe": {"formula": "softmax", "config": E},
    "qwen2_moe": by_list("softmax", {**E, **SHARED}),
    "qwen3_5_moe": {
        "formula": "softmax_normalised",
        "model_type": "qwen3_5_moe_text",
        "config": {**E, **DELTA, **SHARED},
        "notes": "text model",
    },
    "qwen3_moe": by_list("softmax_normalised", {**E, "norm_topk_prob": True}),
    "qwen3_next": by_list("softmax_normalised", {**E, **DELTA, **SHARED}),
    "qwen3_vl_moe": by_list(
        "softmax_normalised", {**LOCAL, **MROPE}, model_class="Qwen3VLMoeForConditionalGeneration", notes="text only"
    ),
    "qwen4_exp": {
        "formula": "softmax_normalised",
        "model_type": "qwen4_exp_text",
        "config": {
            **E,
            **DELTA,
            **SHARED,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        },
        "notes": "text model",
    },
    "sarvam_mla": by_first("sigmoid_normalised", {**ROUTED, **LATENT, **GROUPS}),
    "sarvam_moe": by_first("sigmoid_normalised", {**ROUTED, **GROUPS}),
    "solar_open": {"formula": "sigmoid_normalised", "config": {**ROUTED, **GROUPS}},
}

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "deepstack_visual_indexes": [],
    "num_position_embeddings": 16,
    "image_size": 28,
    "head_dim": 8,
    "projection_intermediate_size": 16,
}
LARGER: Mapping[str, Mapping[str, Any]] = {
    name: {"vision_config": VISION} for name in ("glm4v_moe", "glm5_next", "hy_v4_vl", "mistral_large4", "qwen3_vl_moe")
}
"""Families whose config is one part of a larger one: the other parts."""

SINCE: Mapping[str, str] = {
    "bailing_hybrid": "5.20",
    "beam": "5.21",
    "dots3_note": "5.23",
    "flint": "5.21",
    "hy_v4_vl": "5.24",
    "inkling2": "5.23",
    "inkling2_loop": "5.24",
    "kolibri1": "5.20",
    "lara_mini": "5.24",
    "mistral_large4": "5.22",
    "sarvam_mla": "5.24",
    "sarvam_moe": "5.24",
}
"""The release of transformers that brought a family, if it is not in 5.18, the oldest one that is allowed."""

BFLOAT16_SINCE: Mapping[str, str] = {"deepseek_v4": "5.20"}
"""Families that do not run in bfloat16 before a release, by transformers' own fault."""

ENCODER_DECODER = {"d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "num_experts": 8, "expert_capacity": 8}
REFUSED_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "doge": {"config": {"num_experts": 16, "is_moe": True}, "says": "product keys"},
    "inkling2_loop": {
        "model_type": "inkling2_loop_text",
        "config": {
            **ROUTED,
            **INKLING,
            "unpadded_vocab_size": 64,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_gate_rank": 4,
        },
        "says": "runs layer 1 3 times",
    },
    "jetmoe": {"config": {**LOCAL, "kv_channels": 8}, "says": "has two modules that rank 8 experts"},
    "longcat_flash": {
        "config": {
            **ROUTED,
            **LATENT,
            "zero_expert_num": 2,
            "moe_topk": 3,
            "num_layers": 2,
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 16,
        },
        "says": "zero-computation experts",
    },
    "nllb-moe": {
        "config": {**ENCODER_DECODER, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32},
        "model_class": "NllbMoeForConditionalGeneration",
        "says": "encoder-decoder",
    },
    "phimoe": {"config": {**LOCAL, "num_experts_per_tok": 2}, "says": "sparsemixer"},
    "switch_transformers": {
        "config": {**ENCODER_DECODER, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 32, "d_kv": 8, "num_heads": 4},
        "model_class": "SwitchTransformersForConditionalGeneration",
        "says": "encoder-decoder",
    },
    "zaya": {
        "config": {**E, "router_hidden_size": 16, "num_experts_per_tok": 1, "layer_types": ["hybrid"] * 3},
        "says": "it may choose to skip",
    },
}
