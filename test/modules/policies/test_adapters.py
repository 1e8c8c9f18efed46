"""Adapters added to their weights are what ``merge_and_unload`` makes, and the model stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.adapters import takes_adapters
from torchrl_moe.modules.policies.unstack import (
    LoraLayers,
    ModelWeights,
    base_model,
    checkpoint_tensors,
    has_adapters,
    whole,
)
from torchrl_moe.testing import make_tiny_moe

peft = pytest.importorskip("peft")

TARGETS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "router": {"target_parameters": ["mlp.gate.weight"], "lora_alpha": 32},
    "head": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
}


def adapted(family: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    torch.manual_seed(0)
    model = make_tiny_moe(family, dtype=dtype)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", list(TARGETS))
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_merged_on_the_fly_is_merged_for_good(family: str, targets: str, dtype: torch.dtype) -> None:
    model = adapted(family, dtype, **TARGETS[targets])
    if targets == "head":
        nn.init.normal_(model.base_model.model.lm_head.modules_to_save["default"].weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = ModelWeights(model)
    found = {name: tensor.clone() for name, tensor in weights.tensors()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == weights.kinds
    wanted = checkpoint_tensors(model.merge_and_unload())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    plain = checkpoint_tensors(make_tiny_moe(family, dtype=dtype))
    assert any(not torch.equal(found[name], plain[name]) for name in plain)  # the adapters do something


def test_they_are_of_now_and_one_that_was_merged_already_counts_once() -> None:
    model = adapted("qwen3_moe", target_modules=["q_proj"])
    weights, name = ModelWeights(model), "model.layers.0.self_attn.q_proj.weight"
    apart = {name: tensor.clone() for name, tensor in weights.tensors()}
    model.merge_adapter()
    together = dict(ModelWeights(model).tensors())
    assert all(torch.equal(apart[name], together[name]) for name in apart)
    model.unmerge_adapter()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.zero_()
    after = dict(weights.tensors())[name]
    assert not torch.equal(after, apart[name])
    assert torch.equal(after, model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight)


@takes_adapters
def test_adapters_added_without_a_wrapper_count_too() -> None:
    model = make_tiny_moe()
    plain = checkpoint_tensors(make_tiny_moe())
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"]))
    assert has_adapters(model)
    found = checkpoint_tensors(model)
    assert found.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(found[name], plain[name])}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(4)}


@pytest.mark.parametrize("extra", [{"use_dora": True}, {"lora_bias": True}])
def test_what_is_no_plain_sum_is_refused(extra: dict[str, Any]) -> None:
    model = make_tiny_moe()
    if "lora_bias" in extra:
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias = nn.Parameter(torch.zeros(layer.self_attn.q_proj.out_features))
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], **extra)
    with pytest.raises(TypeError, match=r"q_proj has an adapter that is not a plain sum.*call model\.merge_and_unload"):
        checkpoint_tensors(peft.get_peft_model(model, config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_may_have_adapters(dtype: torch.dtype) -> None:
    model = adapted("mixtral", dtype, target_modules=["embed_tokens", "lm_head"], lora_alpha=32)
    found = {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}
    layer = model.base_model.model.model.embed_tokens
    down, up = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    wanted = layer.base_layer.weight.float() + 8 * (up @ down).T  # 32 / r
    assert torch.equal(found["model.embed_tokens.weight"], wanted.to(dtype))
    if dtype is torch.float32:
        merged, ids = make_tiny_moe("mixtral"), torch.tensor([[1, 2, 3, 250]])
        merged.load_state_dict({name: found.get(name, tensor) for name, tensor in merged.state_dict().items()})
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.filterwarnings("ignore:Model with? .*tie_word_embeddings")
def test_one_of_two_tied_weights_cannot_have_an_adapter(target: str) -> None:
    """What the engine has once would be two; without the adapter, or when it is merged, it is one."""
    model = make_tiny_moe(tie_word_embeddings=True, num_hidden_layers=2)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", target])
    model = peft.get_peft_model(model, config)
    words = rf"{target} has an adapter, which cannot be added to .*{target}\.weight: that is tied to another weight"
    for also in ((), ("lm_head.weight",)):
        with pytest.raises(TypeError, match=words):
            ModelWeights(model, also)
    layer = next(module for name, module in model.named_modules() if name.endswith(target))
    layer.set_adapter([])
    weights = ModelWeights(model)
    assert torch.equal(dict(weights.tensors())["model.embed_tokens.weight"], layer.base_layer.weight)
    layer.set_adapter(["default"])
    with pytest.raises(TypeError, match=words):
        next(weights.tensors())
    model.merge_adapter()
    assert torch.equal(dict(weights.tensors())["model.embed_tokens.weight"], layer.base_layer.weight)


def test_what_goes_to_no_tensor_of_the_checkpoint_or_is_no_lora_is_refused() -> None:
    model = adapted("qwen3_moe", target_modules=["q_proj"])
    model.base_model.model.model.layers[0].self_attn.q_proj.parameter_name = "another"
    with pytest.raises(TypeError, match=r"layers\.0\.self_attn\.q_proj has an adapter"):
        ModelWeights(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2])
    model = peft.get_peft_model(make_tiny_moe("mixtral", num_hidden_layers=1), config)
    with pytest.raises(TypeError, match=r"embed_tokens.* has an adapter that is not LoRA \(TrainableTokensLayer\)"):
        checkpoint_tensors(model)


def test_a_model_without_adapters_has_none() -> None:
    model = make_tiny_moe()
    assert not has_adapters(model)
    assert base_model(model) is model
    assert "lm_head.weight" not in LoraLayers(model)
    tensor = torch.ones(2)
    assert whole(tensor) is tensor
