"""Models that are loaded and tried, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.plain import loaded, save
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.transformers.loading import Loaded
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer
from torchrl_moe.testing.tiny_moe import make_tiny_moe


def test_it_says_what_it_is(plain: Loaded, plain_folder: Path) -> None:
    info = plain.info
    assert (info.model, info.max_model_len, info.dtype, info.forced_routing_unavailable_reason) == (
        str(plain_folder),
        128,
        "float32",
        "",
    )
    assert info.layout == RoutingLayout(num_layers=4, moe_layers=(1, 2, 3), top_k=4, num_experts=16)
    assert info.engine_version.startswith("transformers ")
    assert plain.decoder.token_bytes == 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, width, float32


def test_a_dense_model_has_no_routes(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3")
    engine = loaded(folder, max_model_len=None)
    assert (engine.info.layout, engine.info.forced_routing_unavailable_reason) == (
        None,
        "the engine captures no routes",
    )
    assert engine.info.max_model_len == engine.decoder.model.config.max_position_embeddings
    with pytest.raises(ValueError, match="has no experts: a dense model"):
        loaded(folder, enable_return_routed_experts=True)


@pytest.mark.parametrize(("router_dtype", "held"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_routers_are_held_in_float32_if_they_are_asked_to(
    plain_folder: Path, router_dtype: str, held: torch.dtype
) -> None:
    model: Any = loaded(plain_folder, dtype="bfloat16", router_dtype=router_dtype).decoder.model
    assert {layer.mlp.gate.weight.dtype for layer in model.model.layers[1:]} == {held}
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_model_len": 10**6}, ValueError, "max_model_len=1000000, but the model has max_position_embeddings="),
        ({"tokenizer": "/no/such/folder"}, (OSError, ValueError), "no/such/folder"),
    ],
)
def test_arguments_that_do_not_fit_the_model_are_refused(
    plain_folder: Path, arguments: dict[str, Any], error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        loaded(plain_folder, **arguments)


def test_a_model_whose_forward_pass_wants_another_cache_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    config = AutoConfig.for_model(
        "qwen3_next",
        vocab_size=259,
        num_hidden_layers=4,
        head_dim=16,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
        **sizes,
        **experts,
        **linear,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot serve Qwen3NextForCausalLM: .*; try vLLM"):
        loaded(tmp_path)


def test_the_models_own_ends_are_known(tmp_path: Path) -> None:
    model = make_tiny_moe("qwen3_moe")
    model.generation_config.eos_token_id = [258, 10]
    model.save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    words = loaded(tmp_path).reader.tokenizer
    assert (words.eos, words.more_eos) == (258, {10})


def test_positions_that_turn_by_other_angles_in_longer_batches_are_refused(tmp_path: Path) -> None:
    """Longrope: one long answer would change what is computed for all others, and for its own keys."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    folder = save(tmp_path, "qwen3", rope_parameters=rope)
    with pytest.raises(ValueError, match="once a sequence of the batch is longer than 64: pass max_model_len=64"):
        loaded(folder)
    assert loaded(folder, max_model_len=64).info.max_model_len == 64
