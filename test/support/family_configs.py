"""The configs of ``families.py``: keys over its ``SMALL``, and what the page's table says of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# fmt: off
E, LOCAL, ROUTED = {"num_experts": 8}, {"num_local_experts": 8}, {"n_routed_experts": 8}
GROUPS = {"n_group": 4, "topk_group": 2}
SHARED = {"shared_expert_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 4}
INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
SPARSE_LATENT = {**LATENT, **INDEXER}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SLIDING = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
DELTA = {**LINEAR, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4}
KIMI = {**LINEAR, **LATENT, "linear_head_dim": 8, "linear_num_heads": 4, "num_expert_group": 4, "topk_group": 2,
        "num_experts_per_token": 3}
INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
ENCODER_DECODER = {"d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "num_experts": 8, "expert_capacity": 8}
# fmt: on

FIELDS = ("model_type", "model_class", "layers", "dense", "notes")
"""What a row says of a family besides its config."""


def every(formula: str, *parts: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A family whose layers all have experts; ``parts`` and the rest of ``more`` are its config."""
    given = {name: more.pop(name) for name in FIELDS if name in more}
    return {
        "formula": formula,
        **given,
        "config": {key: value for part in (*parts, more) for key, value in part.items()},
    }


def but_the_first(key: str, value: Any) -> Callable[..., dict[str, Any]]:
    """A family whose first layer of three is dense, by a key of its config."""
    return lambda formula, *parts, **more: every(formula, *parts, {key: value}, layers=(1, 2), dense=key, **more)


def refused(says: str, *parts: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """One that is refused, and a part of the error."""
    return {"says": says, **every("", *parts, **more)}


TYPES = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
by_types, by_first = (
    but_the_first("mlp_layer_types", TYPES["mlp_layer_types"]),
    but_the_first("first_k_dense_replace", 1),
)
by_list, by_count = but_the_first("mlp_only_layers", [0]), but_the_first("num_dense_layers", 1)

# fmt: off
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": by_count("sigmoid_normalised", E),
    "aria": every("softmax_of_chosen", model_type="aria_text", notes="text model", moe_num_experts=8, moe_topk=3),
    "axk1": by_types("sigmoid_normalised", ROUTED, LATENT, GROUPS),
    "axk2": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, gated_norm_rank=8),
    "axk2 (groups)": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS, gated_norm_rank=8),
    "bailing_hybrid": by_first("sigmoid_normalised", E, KIMI, TYPES),
    "beam": by_types("sigmoid_normalised", E, GROUPS, SLIDING),
    "cohere2_moe": by_types("softmax_of_chosen", E, num_shared_experts=1),
    "cohere2_moe (sigmoid)": by_types("sigmoid_normalised", E, expert_selection_fn="sigmoid"),
    "dbrx": every("softmax_normalised", notes="the block chooses, not its router", d_model=32, n_heads=4, n_layers=3,
        max_seq_len=64, attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 3, "hidden_size": 32}),
    "deepseek_v2": by_first("softmax", ROUTED, LATENT, routed_scaling_factor=1.5),
    "deepseek_v2 (group_limited)": by_first("softmax", ROUTED, LATENT, GROUPS, notes="groups are opened",
        topk_method="group_limited_greedy"),
    "deepseek_v3": by_first("sigmoid_normalised", ROUTED, LATENT, GROUPS),
    "deepseek_v32": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS),
    "deepseek_v4": every("sqrtsoftplus_normalised", ROUTED, INDEXER, layers=(1, 2), dense="mlp_layer_types",
        notes="hash layers choose by token: they have no routes", head_dim=16, qk_rope_head_dim=8,
        num_key_value_heads=1, q_lora_rank=16, o_groups=2, o_lora_rank=8, hc_mult=2,
        layer_types=["compressed_sparse_attention", *["heavily_compressed_attention"] * 2],
        mlp_layer_types=["hash_moe", "moe", "moe"]),
    "dots1": by_first("sigmoid_normalised", ROUTED, GROUPS, n_shared_experts=1, norm_topk_prob=True),
    "dots3_note": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS, model_type="dots3_note_text",
        notes="text model", head_dim=16, shared_experts_intermediate_size=16,
        layer_types=["indexed_attention", "sliding_attention", "indexed_attention"], per_layer_config={}),
    "ernie4_5_moe": every("softmax_normalised", layers=(1, 2), dense="moe_layer_start_index", moe_num_experts=8,
        moe_k=3, moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_end_index=2),
    "exaone_moe": by_types("sigmoid_normalised", E, GROUPS),
    "flex_olmo": every("softmax", E),
    "flint": by_list("sigmoid_normalised", E, SHARED),
    "gemma4": every("gemma", E, SLIDING, model_type="gemma4_text", notes="text model; a dense MLP beside the experts",
        top_k_experts=3, enable_moe_block=True, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
        per_layer_config={}),
    "glm4_moe": by_first("sigmoid_normalised", ROUTED, GROUPS),
    "glm4_moe_lite": by_types("sigmoid_normalised", ROUTED, LATENT, GROUPS),
    "glm4v_moe": by_first("sigmoid_normalised", ROUTED, GROUPS, model_class="Glm4vMoeForConditionalGeneration",
        notes="text only", head_dim=16, rope_parameters={**MROPE["rope_parameters"], "partial_rotary_factor": 0.5}),
    "glm5_next": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS,
        model_class="Glm5NextForConditionalGeneration", notes="text only",
        layer_types=["linear_attention", "indexed_attention", "linear_attention"], linear_head_dim=8,
        linear_num_heads=4, hc_mult=2, index_kpool=2, qk_rope_head_dim=0),
    "glm_moe_dsa": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS),
    "gpt_oss": every("softmax_of_chosen", LOCAL),
    "granitemoe": every("softmax_of_chosen", LOCAL),
    "granitemoe_swa": every("softmax_of_chosen", LOCAL, shared_intermediate_size=16),
    "granitemoehybrid": every("softmax_of_chosen", LOCAL, LINEAR, shared_intermediate_size=16, mamba_n_heads=4,
        mamba_d_head=16, mamba_d_state=8, mamba_expand=2),
    "granitemoeshared": every("softmax_of_chosen", LOCAL, shared_intermediate_size=16),
    "hunyuan_v1_moe": every("softmax_normalised", E, moe_topk=3),
    "hy_v3": by_types("sigmoid_normalised", E),
    "hy_v4": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS, hc_mult=2),
    "hy_v4_vl": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS, MROPE,
        model_class="HYV4VLForConditionalGeneration", notes="text only", hc_mult=2),
    "inkling": by_types("inkling", ROUTED, INKLING, model_type="inkling_text",
        notes="text model; shared experts are weighted beside the chosen", n_shared_experts=2,
        logits_mup_width_multiplier=1.0),
    "inkling2": every("sigmoid_normalised", ROUTED, INKLING, model_type="inkling2_text", notes="text model",
        unpadded_vocab_size=64, n_layers_per_attn_res_block=2),
    "jamba": every("softmax", E, layers=(1,), dense="expert_layer_period", expert_layer_period=2, expert_layer_offset=1,
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False),
    "kimi_linear": by_types("sigmoid_normalised", E, KIMI),
    "kolibri1": every("sigmoid", LOCAL, SHARED),
    "laguna": by_types("sigmoid_capped", E, SHARED, num_attention_heads_per_layer=[4, 4, 4],
        moe_router_logit_softcapping=2.0),
    "lara_mini": every("softmax_normalised", E, DELTA, SHARED,
        layer_types=["linear_attention", "full_attention", "sliding_attention"]),
    "lfm2_moe": by_count("sigmoid_eps", E, layer_types=["conv", "full_attention", "conv"]),
    "llama4": every("llama", LOCAL, model_type="llama4_text", layers=(1,), dense="moe_layers",
        notes="text model; every expert runs, on inputs times 0 if not chosen", intermediate_size_mlp=32,
        interleave_moe_layer_step=2),
    "mellum": by_types("softmax_normalised", LOCAL, SLIDING),
    "mimo_v2_flash": by_types("sigmoid_normalised", ROUTED, GROUPS, SLIDING, v_head_dim=8),
    "minimax": every("softmax_normalised", LOCAL, LINEAR, block_size=4),
    "minimax_m2": every("sigmoid_normalised", LOCAL),
    "minimax_m3_vl": by_types("sigmoid_normalised", LOCAL, model_type="minimax_m3_vl_text", notes="text model",
        shared_intermediate_size=16, dense_intermediate_size=32, rotary_dim=4),
    "mistral4": by_first("softmax_normalised", ROUTED, LATENT, GROUPS, model_class="Mistral4ForCausalLM", head_dim=16),
    "mistral_large4": by_first("softmax_normalised", ROUTED, SPARSE_LATENT, GROUPS,
        model_class="MistralLarge4ForConditionalGeneration", notes="text only"),
    "mixtral": every("softmax_normalised", LOCAL),
    "nemotron_h": every("sigmoid_normalised", ROUTED, GROUPS, layers=(1, 3), dense="layers_block_type",
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"], moe_shared_expert_intermediate_size=16,
        mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=8, num_hidden_layers=4),
    "olmoe": every("softmax", E),
    "qwen2_moe": by_list("softmax", E, SHARED),
    "qwen3_5_moe": every("softmax_normalised", E, DELTA, SHARED, model_type="qwen3_5_moe_text", notes="text model"),
    "qwen3_moe": by_list("softmax_normalised", E, norm_topk_prob=True),
    "qwen3_next": by_list("softmax_normalised", E, DELTA, SHARED),
    "qwen3_vl_moe": by_list("softmax_normalised", LOCAL, MROPE, model_class="Qwen3VLMoeForConditionalGeneration",
        notes="text only"),
    "qwen4_exp": every("softmax_normalised", E, DELTA, SHARED, model_type="qwen4_exp_text", notes="text model",
        layer_types=["linear_attention", "indexed_attention", "linear_attention"], hc_lowrank=8, indexer_n_heads=2,
        indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=4, indexer_compress_ratio=2),
    "sarvam_mla": by_first("sigmoid_normalised", ROUTED, LATENT, GROUPS),
    "sarvam_moe": by_first("sigmoid_normalised", ROUTED, GROUPS),
    "solar_open": every("sigmoid_normalised", ROUTED, GROUPS),
}
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32, "head_dim": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "deepstack_visual_indexes": [], "num_position_embeddings": 16,
    "image_size": 28, "projection_intermediate_size": 16,
}
LARGER: Mapping[str, Mapping[str, Any]] = {
    name: {"vision_config": VISION} for name in ("glm4v_moe", "glm5_next", "hy_v4_vl", "mistral_large4", "qwen3_vl_moe")
}
"""Families whose config is one part of a larger one: the other parts."""

SINCE: Mapping[str, str] = {
    "bailing_hybrid": "5.20", "kolibri1": "5.20", "beam": "5.21", "flint": "5.21", "mistral_large4": "5.22",
    "dots3_note": "5.23", "inkling2": "5.23", "hy_v4_vl": "5.24", "inkling2_loop": "5.24", "lara_mini": "5.24",
    "sarvam_mla": "5.24", "sarvam_moe": "5.24",
}
"""The release of transformers that brought a family, if it is not in 5.18, the oldest one that is allowed."""

BFLOAT16_SINCE: Mapping[str, str] = {"deepseek_v4": "5.20"}
"""Families that do not run in bfloat16 before a release, by transformers' own fault."""

REFUSED_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "doge": refused("product keys", num_experts=16, is_moe=True),
    "inkling2_loop": refused("runs layer 1 3 times", ROUTED, INKLING, model_type="inkling2_loop_text",
        unpadded_vocab_size=64, n_layers_per_attn_res_block=1, loop_layer_index_start=1, loop_layer_index_end=2,
        loop_gate_rank=4),
    "jetmoe": refused("has two modules that rank 8 experts", LOCAL, kv_channels=8),
    "longcat_flash": refused("zero-computation experts", ROUTED, LATENT, zero_expert_num=2, moe_topk=3, num_layers=2,
        ffn_hidden_size=32, expert_ffn_hidden_size=16),
    "nllb-moe": refused("encoder-decoder", ENCODER_DECODER, model_class="NllbMoeForConditionalGeneration",
        decoder_ffn_dim=32, encoder_ffn_dim=32),
    "phimoe": refused("sparsemixer", LOCAL, num_experts_per_tok=2),
    "switch_transformers": refused("encoder-decoder", ENCODER_DECODER,
        model_class="SwitchTransformersForConditionalGeneration", num_layers=2, num_decoder_layers=2, d_ff=32, d_kv=8,
        num_heads=4),
    "zaya": refused("it may choose to skip", E, router_hidden_size=16, num_experts_per_tok=1,
        layer_types=["hybrid"] * 3),
}
# fmt: on
