"""Counts of the models that configurations name, by hand; activations against those of a real pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchrl_moe._compat_memory import peak_bytes
from torchrl_moe.modules.policies.unstack import model_metadata
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.trainers import ConfigError
from torchrl_moe.trainers.config import LoRAConfig, ModelConfig
from torchrl_moe.trainers.plan import KNOWN, ModelSizes, activation_bytes, model_config_of
from torchrl_moe.trainers.policy_model import prepared

QWEN, OLMOE = "Qwen/Qwen3-30B-A3B", "allenai/OLMoE-1B-7B-0125"


def test_qwen3_30b_a3b_by_hand() -> None:
    hidden, words, experts, inner = 2048, 151936, 128, 768
    attention = hidden * (32 * 128) * 2 + hidden * (4 * 128) * 2 + 2 * 128  # q and o, k and v, two norms of a head
    layer = attention + experts * 3 * hidden * inner + experts * hidden + 2 * hidden
    outside = 2 * words * hidden + hidden
    sizes = ModelSizes.of(model_config_of(QWEN), ModelConfig())
    assert (sizes.layer, sizes.outside) == (layer, outside)
    assert sizes.parameters == sizes.trained == 48 * layer + outside == 30_532_122_624  # 61 064 245 248 B on the hub
    assert sizes.experts == 48 * experts * 3 * hidden * inner
    assert (sizes.largest, sizes.hidden, sizes.expert_width) == (experts * 2 * inner * hidden, hidden, inner)
    assert sizes.adapted == 0
    assert (sizes.layers, sizes.top_k, sizes.num_experts) == (48, 8, 128)
    assert sizes.kv == 48 * 2 * 4 * 128
    assert sizes.route_bytes == 48 * 8


def test_olmoe_by_hand() -> None:
    hidden, words, experts, inner = 2048, 50304, 64, 1024
    attention = 4 * hidden * hidden + 2 * hidden
    layer = attention + experts * 3 * hidden * inner + experts * hidden + 2 * hidden
    sizes = ModelSizes.of(model_config_of(OLMOE), ModelConfig())
    assert sizes.parameters == 16 * layer + 2 * words * hidden + hidden == 6_919_161_856
    assert sizes.kv == 16 * 2 * 2048
    assert sizes.route_bytes == 16 * 8


def test_what_is_kept_is_of_equal_settings_only() -> None:
    hf_config, lora = model_config_of(OLMOE), LoRAConfig(rank=8)
    sizes = ModelSizes.of(hf_config, ModelConfig(lora=lora))
    assert ModelSizes.of(model_config_of(OLMOE), ModelConfig(lora=LoRAConfig(rank=8))) is sizes
    lora.rank = 16
    assert ModelSizes.of(hf_config, ModelConfig(lora=lora)).adapter == 2 * sizes.adapter
    hf_config.num_hidden_layers = 8
    assert ModelSizes.of(hf_config, ModelConfig(lora=lora)).adapter == sizes.adapter
    few = activation_bytes(hf_config, ModelConfig(), 1, 64, torch.float32)
    assert activation_bytes(hf_config, ModelConfig(activation_checkpointing=True), 1, 64, torch.float32) < few
    hf_config.num_hidden_layers = 4
    assert activation_bytes(hf_config, ModelConfig(), 1, 64, torch.float32) < few


def test_an_adapter_on_attention_by_hand() -> None:
    rank, hidden = 32, 2048
    sizes = ModelSizes.of(model_config_of(OLMOE), ModelConfig(lora=LoRAConfig(rank=rank)))
    assert sizes.adapter == sizes.trained == 16 * 4 * 2 * rank * hidden
    assert sizes.adapted == 16 * 4 * hidden * hidden
    assert sizes.parameters == 6_919_161_856 + sizes.adapter


def test_more_than_128_experts_take_two_bytes_and_latent_attention_caches_one_vector() -> None:
    config = make_tiny_moe("deepseek_v3").config
    sizes = ModelSizes.of(config, ModelConfig())
    assert sizes.kv == config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    assert sizes.kv_heads == 1  # each GPU of a replica has all of it
    wide = make_tiny_moe("qwen3_moe", num_experts=160).config
    assert ModelSizes.of(wide, ModelConfig()).route_bytes == wide.num_hidden_layers * wide.num_experts_per_tok * 2


@pytest.mark.parametrize(("source", "count"), [(QWEN, 48 * (128 * 3 + 9) + 3), (OLMOE, 16 * (64 * 3 + 9) + 3)])
def test_unstacked_names_are_those_of_the_hub(source: str, count: int) -> None:
    """As many as the hub's index has, one for each expert's matrix, and named as there."""
    from transformers import AutoModelForCausalLM

    config = model_config_of(source)
    config.hidden_size = config.moe_intermediate_size = config.intermediate_size = 64  # no name depends on them
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kinds = model_metadata(model)
    own = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm")
    own += ("self_attn.k_norm", "input_layernorm", "post_attention_layernorm", "mlp.gate")
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in range(config.num_hidden_layers):
        expected |= {f"model.layers.{layer}.{name}.weight" for name in own}
        for expert in range(config.num_experts):
            matrices = (f"mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down"))
            expected |= {f"model.layers.{layer}.{name}" for name in matrices}
    assert len(expected) == count
    assert kinds.keys() == expected


def test_every_known_model_has_its_file_and_no_other_source_does(tmp_path: Path) -> None:
    assert all(model_config_of(name).get_text_config().num_hidden_layers for name in KNOWN)
    with pytest.raises(ConfigError, match=r"model\.source"):
        model_config_of(str(tmp_path / "nothing"))


def real_peak(hf_config: Any, model_config: ModelConfig, sequences: int, tokens: int) -> int:
    """Bytes of a pass that really runs, its gradients made before."""
    from transformers import AutoModelForCausalLM

    from torchrl_moe.modules.policies.scoring_model import ScoringModel, Selection

    model = prepared(AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32), model_config, torch.float32)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    scoring = ScoringModel(model)
    scoring.check()
    ids = torch.randint(0, 100, (sequences, tokens))
    selection = Selection(rows=torch.arange(ids.numel()), tokens=ids.flatten(), temperature=1.0, entropy=True)
    inputs = {"input_ids": ids, "position_ids": torch.arange(tokens).expand(sequences, -1)}
    return peak_bytes(lambda: scoring(inputs, selection)[0].sum().backward())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", 5), ("deepseek_v3", 4), ("mixtral", 3)])
def test_activations_are_within_a_tenth_of_a_real_pass(family: str, layers: int, checkpointing: bool) -> None:
    hf_config = make_tiny_moe(family, num_hidden_layers=layers).config
    model_config = ModelConfig(activation_checkpointing=checkpointing)
    planned = activation_bytes(hf_config, model_config, 4, 200, torch.float32)
    assert planned == pytest.approx(real_peak(hf_config, model_config, 4, 200), rel=0.1)
