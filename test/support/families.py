"""Every MoE of transformers that is tested, made small; those that are refused; and those left out, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing.tiny_moe import _draw_weights

# fmt: off
N, LOCAL, ROUTED = {"num_experts": 8}, {"num_local_experts": 8}, {"n_routed_experts": 8}
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
    """A family whose layers all have experts; ``parts`` and the rest of ``more`` are its config, over :data:`SMALL`."""
    given = {name: more.pop(name) for name in FIELDS if name in more}
    config = {key: value for part in (*parts, more) for key, value in part.items()}
    return {"formula": formula, **given, "config": config}


def but_the_first(key: str, value: Any) -> Callable[..., dict[str, Any]]:
    """A family whose first layer of three is dense, by a key of its config."""
    return lambda formula, *parts, **more: every(formula, *parts, {key: value}, layers=(1, 2), dense=key, **more)


def refused(says: str, *parts: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """One that is refused, and a part of the error."""
    return {"says": says, **every("", *parts, **more)}


TYPES = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
by_types = but_the_first("mlp_layer_types", TYPES["mlp_layer_types"])
by_first = but_the_first("first_k_dense_replace", 1)
by_list, by_count = but_the_first("mlp_only_layers", [0]), but_the_first("num_dense_layers", 1)

# fmt: off
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": by_count("sigmoid_normalised", N),
    "aria": every("softmax_of_chosen", model_type="aria_text", notes="text model", moe_num_experts=8, moe_topk=3),
    "axk1": by_types("sigmoid_normalised", ROUTED, LATENT, GROUPS),
    "axk2": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, gated_norm_rank=8),
    "axk2 (groups)": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS, gated_norm_rank=8),
    "bailing_hybrid": by_first("sigmoid_normalised", N, KIMI, TYPES),
    "beam": by_types("sigmoid_normalised", N, GROUPS, SLIDING),
    "cohere2_moe": by_types("softmax_of_chosen", N, num_shared_experts=1),
    "cohere2_moe (sigmoid)": by_types("sigmoid_normalised", N, expert_selection_fn="sigmoid"),
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
    "exaone_moe": by_types("sigmoid_normalised", N, GROUPS),
    "flex_olmo": every("softmax", N),
    "flint": by_list("sigmoid_normalised", N, SHARED),
    "gemma4": every("gemma", N, SLIDING, model_type="gemma4_text", notes="text model; a dense MLP beside the experts",
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
    "hunyuan_v1_moe": every("softmax_normalised", N, moe_topk=3),
    "hy_v3": by_types("sigmoid_normalised", N),
    "hy_v4": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS, hc_mult=2),
    "hy_v4_vl": by_types("sigmoid_normalised", ROUTED, SPARSE_LATENT, GROUPS, MROPE,
        model_class="HYV4VLForConditionalGeneration", notes="text only", hc_mult=2),
    "inkling": by_types("inkling", ROUTED, INKLING, model_type="inkling_text",
        notes="text model; shared experts are weighted beside the chosen", n_shared_experts=2,
        logits_mup_width_multiplier=1.0),
    "inkling2": every("sigmoid_normalised", ROUTED, INKLING, model_type="inkling2_text", notes="text model",
        unpadded_vocab_size=64, n_layers_per_attn_res_block=2),
    "jamba": every("softmax", N, layers=(1,), dense="expert_layer_period", expert_layer_period=2, expert_layer_offset=1,
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False),
    "kimi_linear": by_types("sigmoid_normalised", N, KIMI),
    "kolibri1": every("sigmoid", LOCAL, SHARED),
    "laguna": by_types("sigmoid_capped", N, SHARED, num_attention_heads_per_layer=[4, 4, 4],
        moe_router_logit_softcapping=2.0),
    "lara_mini": every("softmax_normalised", N, DELTA, SHARED,
        layer_types=["linear_attention", "full_attention", "sliding_attention"]),
    "lfm2_moe": by_count("sigmoid_eps", N, layer_types=["conv", "full_attention", "conv"]),
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
    "olmoe": every("softmax", N),
    "qwen2_moe": by_list("softmax", N, SHARED),
    "qwen3_5_moe": every("softmax_normalised", N, DELTA, SHARED, model_type="qwen3_5_moe_text", notes="text model"),
    "qwen3_moe": by_list("softmax_normalised", N, norm_topk_prob=True),
    "qwen3_next": by_list("softmax_normalised", N, DELTA, SHARED),
    "qwen3_vl_moe": by_list("softmax_normalised", LOCAL, MROPE, model_class="Qwen3VLMoeForConditionalGeneration",
        notes="text only"),
    "qwen4_exp": every("softmax_normalised", N, DELTA, SHARED, model_type="qwen4_exp_text", notes="text model",
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

REFUSED: Mapping[str, Mapping[str, Any]] = {
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
    "zaya": refused("it may choose to skip", N, router_hidden_size=16, num_experts_per_tok=1,
        layer_types=["hybrid"] * 3),
}
# fmt: on
"""By model type: ``says``, of the error, and what else a :class:`Family` has."""

# fmt: off
SMALL: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}
# fmt: on
E, K = 8, 3
OLDEST = "5.18"
"""The oldest release of transformers that ``pyproject.toml`` allows."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type of transformers, one way it is configured, and what replay is to find in it: E = 8, K = 3."""

    formula: str  # a key of gating.FORMULAS
    config: Mapping[str, Any] = field(default_factory=dict)  # over SMALL; of the text part, where there are others
    model_type: str = ""  # if it is not the family's name
    model_class: str = ""  # if it is no AutoModelForCausalLM
    layers: Sequence[int] = (0, 1, 2)  # those with a router
    dense: str = ""  # the config key that makes the others dense
    notes: str = ""  # for the page's table


FAMILIES: Mapping[str, Family] = {name: Family(**values) for name, values in CONFIGS.items()}
"""All are replayed exactly. Several ways of one model type have its name and a suffix in brackets."""

EXCLUDED: Mapping[str, str] = {
    "deepseek_ocr2": "an image-to-text model; its text part is DeepSeek-V2",
    "diffusion_gemma": "a block diffusion model, no causal one",
    "ernie4_5_vl_moe": "tokens of text and of images have routers of their own: two in each layer",
    "muse_spark": "images, sound and text; no text model of its own",
    "granite_docling": "its router chooses a path for images, not experts",
    "openai_privacy_filter": "a token classifier",
    "qwen3_omni_moe": "speech and text; its thinker is Qwen3-VL-MoE",
    "step3p7": "images and text; no text model of its own",
    "unlimited_ocr": "an image-to-text model; its text part is DeepSeek-V2",
    "vitpose_backbone": "a vision backbone",
}
"""Folders of transformers with experts that are no causal language models, or have no text model of their own."""


def model_type(name: str) -> str:
    """The one in the config; a family's name without what is in brackets, if none is given."""
    known = FAMILIES[name].model_type if name in FAMILIES else REFUSED[name].get("model_type", "")
    return known or name.partition(" (")[0]


def since(name: str) -> Version:
    """The release of transformers that brought a family, or the oldest that is allowed."""
    return Version(SINCE.get(name.partition(" (")[0], OLDEST))


def is_absent(name: str, release: str = transformers.__version__) -> bool:
    """Whether a release of transformers has no such family."""
    return Version(release) < since(name)


def runs_in_bfloat16(name: str) -> bool:
    """Whether this release's own code can run a family in bfloat16."""
    return Version(transformers.__version__) >= Version(BFLOAT16_SINCE.get(name, OLDEST))


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """A tiny model of a family, in eval mode."""
    if is_absent(name):
        pytest.skip(f"transformers {since(name)} brought {model_type(name)}, this is {transformers.__version__}")
    family = FAMILIES.get(name) or Family(**{k: v for k, v in REFUSED[name].items() if k != "says"})
    values = {**SMALL, **family.config, **more}
    if name in LARGER:
        values = {"text_config": values, **LARGER[name]}
    config = AutoConfig.for_model(model_type(name), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make = getattr(transformers, family.model_class)._from_config if family.model_class else None
        model = (make or AutoModelForCausalLM.from_config)(config, dtype=dtype)
    fixed = {buffer: buffer.clone() for buffer in model.buffers() if not buffer.is_floating_point()}
    generator = torch.Generator().manual_seed(seed)
    _draw_weights(model, generator)
    for buffer, values in fixed.items():
        is_hash = buffer.ndim == 2  # experts by token
        buffer.copy_(torch.rand(len(buffer), E, generator=generator).argsort(-1)[:, :K] if is_hash else values)
    return model.eval()


@cache
def shared_pair(name: str) -> tuple[PreTrainedModel, RouterReplay]:
    """A family's model and its replay, made once for all tests of a process: leave both as you found them."""
    model = build(name)
    return model, RouterReplay(model)
