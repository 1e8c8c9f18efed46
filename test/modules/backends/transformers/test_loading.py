"""Plain transformers as a kind of engine: its arguments, and the models that are loaded, tried and refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.plain import loaded, save
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.backends.engine_kind import engine_kind
from torchrl_moe.modules.backends.process.process_replica import LocalReplica
from torchrl_moe.modules.backends.transformers import decoder
from torchrl_moe.modules.backends.transformers import transformers_arguments as kind
from torchrl_moe.modules.backends.transformers.decoder import Loaded, layout_of
from torchrl_moe.modules.backends.transformers.transformers_arguments import arguments_of, build_engine_args
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer
from torchrl_moe.testing.tiny_moe import make_tiny_moe


def test_arguments_that_say_what_the_engine_does_anyway_are_left_out() -> None:
    vllms = {"tensor_parallel_size": 1, "compilation_config": {"mode": 0}, "enforce_eager": True, "enable_lora": False}
    assert arguments_of({"model": "m", "seed": 3, **vllms}) == {"model": "m", "seed": 3}
    assert arguments_of({"model": "m", "dtype": torch.bfloat16}) == {"model": "m", "dtype": "bfloat16"}
    built = build_engine_args({"model": "m", "max_model_len": 64})
    assert (built.max_model_len, built.max_num_seqs, built.dtype) == (64, 128, "auto")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor_parallel_size": 2}, "has no tensor_parallel_size=2: a replica computes on one device; raise num_rep"),
        ({"enable_lora": True}, "serves no adapters; send merged weights"),
        ({"enable_prefix_caching": True}, "there is no prefix cache"),
        ({"hf_overrides": {"head_dtype": "float32"}}, "enable_fp32_output is vLLM's"),
        ({"enable_sleep_mode": True}, "the model stays in memory"),
        ({"logprobs_mode": "raw_logprobs"}, "of the distribution that was sampled from"),
        ({"gpu_memory_utilization": 0.5}, "limit it by kv_cache_memory_bytes"),
        ({"no_such_thing": 1}, "has no no_such_thing=1: it knows model, tokenizer, dtype"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32"),
        ({"router_dtype": "bfloat16"}, "router_dtype must be one of auto, float32"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"max_model_len": "abc"}, "max_model_len must be an integer of at least 1, got 'abc'"),
        ({"model": ""}, "engine_args names no model"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arguments_of({"model": "m", **given})
    with pytest.raises(TypeError, match="takes its arguments as a mapping, got SimpleNamespace"):
        arguments_of(SimpleNamespace(**given))  # such as vLLM's own


# -- the kind ----------------------------------------------------------------------------------------------------------
def test_its_program_runs_by_itself_where_none_may_fork_it(plain_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a Ray actor."""
    found = engine_kind("transformers")
    monkeypatch.setattr(found, "reason_not_to_fork", lambda environment: "of the tests")
    replica = LocalReplica(0, found, {"model": str(plain_folder)}, kind.engine_environment())
    replica.start()
    try:
        assert replica.wait_ready(240.0).model == str(plain_folder)
    finally:
        replica.shutdown()


# -- models ------------------------------------------------------------------------------------------------------------
def test_it_says_what_it_is(plain: Loaded, plain_folder: Path) -> None:
    info = plain.info
    assert (info.model, info.max_model_len, info.dtype) == (str(plain_folder), 128, "float32")
    assert info.forced_routing_unavailable_reason == ""
    assert info.layout == RoutingLayout(num_layers=4, moe_layers=(1, 2, 3), top_k=4, num_experts=16)
    assert info.engine_version.startswith("transformers ")
    assert plain.decoder.token_bytes == 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, width, float32
    words = f"max_model_len={10**6}, but the model has max_position_embeddings="
    with pytest.raises(ValueError, match=words):
        loaded(plain_folder, max_model_len=10**6)
    with pytest.raises((OSError, ValueError), match="no/such/folder"):
        loaded(plain_folder, tokenizer="/no/such/folder")


def test_a_dense_model_has_no_routes(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3")
    engine = loaded(folder, max_model_len=None)
    assert engine.info.layout is None
    assert engine.info.forced_routing_unavailable_reason == "the engine captures no routes"
    assert engine.info.max_model_len == engine.decoder.model.config.max_position_embeddings
    with pytest.raises(ValueError, match="has no experts: a dense model"):
        loaded(folder, enable_return_routed_experts=True)


@pytest.mark.parametrize(("router_dtype", "held"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_routers_are_held_in_float32_if_asked_to(plain_folder: Path, router_dtype: str, held: torch.dtype) -> None:
    model: Any = loaded(plain_folder, dtype="bfloat16", router_dtype=router_dtype).decoder.model
    assert {layer.mlp.gate.weight.dtype for layer in model.model.layers[1:]} == {held}
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_a_model_whose_forward_pass_wants_another_cache_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts["shared_expert_intermediate_size"] = 16
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 8, "head_dim": 16, "vocab_size": 259, "num_hidden_layers": 4}
    config = AutoConfig.for_model("qwen3_next", **sizes, **experts, **linear)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot serve Qwen3NextForCausalLM: .*; try vLLM"):
        loaded(tmp_path)


def test_the_models_own_ends_are_known(tmp_path: Path) -> None:
    model = make_tiny_moe("qwen3_moe")
    model.generation_config.eos_token_id = [258, 10]
    model.save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    words = loaded(tmp_path).tokenizer
    assert (words.eos, words.more_eos) == (258, {10})


def test_positions_that_turn_by_other_angles_in_longer_batches_are_refused(tmp_path: Path) -> None:
    """Longrope: one long answer would change what is computed for all others, and for its own keys."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    folder = save(tmp_path, "qwen3", rope_parameters=rope)
    with pytest.raises(ValueError, match="once a sequence of the batch is longer than 64: pass max_model_len=64"):
        loaded(folder)
    assert loaded(folder, max_model_len=64).info.max_model_len == 64


def test_a_model_that_hides_its_routes_is_served_without(plain_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> Any:
        raise UnsupportedRouterError("its router hides")

    monkeypatch.setattr(decoder, "RouterReplay", refuse)
    with pytest.raises(UnsupportedRouterError, match=r"hides\. enable_return_routed_experts=False serves it without"):
        loaded(plain_folder)


def test_routers_of_different_sizes_have_no_layout() -> None:
    sites = [SimpleNamespace(top_k=top_k, num_experts=8) for top_k in (2, 1)]
    replay: Any = SimpleNamespace(sites=sites, model=torch.nn.Identity())
    with pytest.raises(UnsupportedRouterError, match="Identity has routers of different sizes"):
        layout_of(replay)
