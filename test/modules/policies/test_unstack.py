"""Weights under checkpoint names are those that ``save_pretrained`` writes, bit by bit; adapters are added to them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from support.adapters import takes_adapters
from torchrl_moe.modules import RouterReplay
from torchrl_moe.modules.policies.unstack import (
    ModelWeights,
    checkpoint_tensors,
    has_adapters,
    linear_parts,
    logit_transform,
    model_metadata,
    obstacle,
)
from torchrl_moe.ops import LogitTransform
from torchrl_moe.testing import make_tiny_moe

FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"]


def assert_same(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    assert tensors.keys() == saved.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == saved[name].dtype, name
        assert torch.equal(tensor, saved[name]), name


def copied(tensors: Any, by: float = 1) -> dict[str, Tensor]:
    return {name: by * tensor.detach().clone() for name, tensor in dict(tensors).items()}


def scale(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.mul_(by)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_those_of_save_pretrained(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_tiny_moe(family, dtype=dtype)
    model.save_pretrained(tmp_path)
    assert_same(checkpoint_tensors(model), load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_of_now_and_neither_they_nor_router_replay_change_the_model(family: str) -> None:
    model = make_tiny_moe(family)
    state = copied(model.state_dict())
    before = copied(checkpoint_tensors(model))
    assert_same(dict(model.state_dict()), state)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert_same(checkpoint_tensors(torch.compile(model)), before)
    replay = RouterReplay(model)
    assert_same(checkpoint_tensors(model), before)
    replay.remove()
    scale(model, 2)
    assert_same(checkpoint_tensors(model), copied(before, 2))


def test_tied_embeddings_come_once_and_buffers_count(tmp_path: Path) -> None:
    model = make_tiny_moe("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = checkpoint_tensors(model)
    assert "lm_head.weight" not in tensors
    assert_same(tensors, load_file(tmp_path / "model.safetensors"))
    model = make_tiny_moe("deepseek_v3", dtype=torch.bfloat16)
    tensors = checkpoint_tensors(model)
    biases = [tensor for name, tensor in tensors.items() if "correction_bias" in name]
    assert len(biases) == 3
    assert all(tensor.any() for tensor in biases)
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    assert model_metadata(model) == kinds
    assert {dtype for dtype, _ in kinds.values()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_views_of_the_stacked_tensors_and_made_once(family: str) -> None:
    weights = ModelWeights(make_tiny_moe(family))
    once = dict(weights.tensors())
    storages = {tensor.untyped_storage().data_ptr() for tensor in weights._state().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in once.values()} <= storages
    assert all(tensor is once[name] for name, tensor in weights.tensors())


MOVES: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "another place": lambda _, parameter: setattr(parameter, "data", parameter.data.clone()),
    "another layout": lambda _, parameter: setattr(parameter, "data", parameter.data.mT.contiguous().mT),
    "another device": lambda model, _: model.to("meta"),
}


def test_memory_that_the_model_has_left_is_free_after_the_next_reading_and_nothing_of_a_gpu_is_held() -> None:
    kept, left = [], {}
    for name, move in MOVES.items():
        model = make_tiny_moe("mixtral", num_hidden_layers=1)
        weights, parameter = ModelWeights(model), model.model.layers[0].mlp.experts.down_proj
        dict(weights.tensors())
        left[name] = weakref.ref(parameter.untyped_storage())
        move(model, parameter)
        dict(weights.tensors())
        kept.append((model, weights))
    del parameter
    model = kept[-1][0]  # on "meta", which stands for a GPU here
    left["a GPU"] = weakref.ref(model.lm_head.weight.untyped_storage())
    model.to_empty(device="cpu")
    gc.collect()  # once: it takes a second
    assert {name: storage() for name, storage in left.items()} == dict.fromkeys(left)


def test_a_tied_name_that_is_asked_for_comes_too_and_costs_no_other_reading() -> None:
    """Ranks that do not know of it (the engine is rank 0's) gather as often as the one that does."""
    model = make_tiny_moe("qwen3_moe", tie_word_embeddings=True)
    weights = ModelWeights(model, also=["lm_head.weight", "of_no_model.weight"])
    assert weights.keys == ModelWeights(model).keys == set(model.state_dict()) - {"lm_head.weight"}
    found = dict(weights.tensors())
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert weights.kinds.keys() == found.keys() == checkpoint_tensors(model).keys() | {"lm_head.weight"}


def test_a_parameter_that_was_replaced_or_is_not_contiguous_is_cut_right() -> None:
    model = make_tiny_moe("qwen3_moe")
    weights = ModelWeights(model)
    wanted = copied(weights.tensors())
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj.data = experts.gate_up_proj.data.mT.contiguous().mT
    assert not experts.gate_up_proj.is_contiguous()
    assert_same(dict(weights.tensors()), wanted)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    assert_same(dict(weights.tensors()), copied(wanted, 2))


def test_layers_that_are_no_slices_are_converted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in families that interleave or permute; here layers are made to look like it."""
    from torchrl_moe.modules.policies import unstack

    model = make_tiny_moe("qwen3_moe")
    wanted = copied(checkpoint_tensors(model))
    place = unstack._place
    monkeypatch.setattr(unstack, "_place", lambda name, *rest: None if "experts.1" in name else place(name, *rest))
    weights = ModelWeights(model)
    assert [keys[0].split(".mlp")[0] for keys in weights._converted] == [f"model.layers.{i}" for i in (1, 2, 3)]
    assert_same(dict(weights.tensors()), wanted)
    assert weights.kinds == model_metadata(model)
    assert weights.keys == set(model.state_dict())
    scale(model, 2)
    assert_same(dict(weights.tensors()), copied(wanted, 2))


# -- adapters added to their weights are what ``merge_and_unload`` makes, and the model stays as it was ---------------

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
def test_a_module_that_adapters_save_is_that_of_the_active_one() -> None:
    kinds = {"a": {"modules_to_save": ["lm_head"]}, "b": {"modules_to_save": ["lm_head"]}, "c": {}}
    configs = {name: LoraConfig(r=2, target_modules=["q_proj"], **kind) for name, kind in kinds.items()}
    model: Any = peft.get_peft_model(make_tiny_moe(), configs["a"], adapter_name="a")
    for name in "bc":
        model.add_adapter(name, configs[name])
    head = model.base_model.model.lm_head
    nn.init.zeros_(head.modules_to_save["a"].weight)
    nn.init.ones_(head.modules_to_save["b"].weight)
    weights = ModelWeights(model)
    for name, wanted in {**head.modules_to_save, "c": head.original_module, "a": head.modules_to_save["a"]}.items():
        model.set_adapter(name)
        assert torch.equal(dict(weights.tensors())["lm_head.weight"], wanted.weight)


@takes_adapters
def test_adapters_added_without_a_wrapper_count_too() -> None:
    model = make_tiny_moe()
    plain = {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}
    assert not has_adapters(model)
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
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", target])
    model = peft.get_peft_model(make_tiny_moe(tie_word_embeddings=True, num_hidden_layers=2), config)
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


# -- the parts of a head multiply and add up to what the head itself computes, in every state that peft knows ---------

HIDDEN = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.lm_head: Any = nn.Linear(8, 11, bias=bias)


def with_head(**config: Any) -> tuple[nn.Module, Any]:
    """A head with one adapter whose B is not 0, as it is at first."""
    config = {"r": 2, "lora_alpha": 6, "target_modules": ["lm_head"], **config}
    model: Any = inject_adapter_in_model(LoraConfig(**config), Model(), "mine")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model, model.lm_head


def assert_parts(head: nn.Module, count: int) -> None:
    assert obstacle(head) == ""
    hiddens, weights, bias = linear_parts(head, HIDDEN)
    assert len(hiddens) == len(weights) == count
    total: Tensor | int = sum(h @ w.T for h, w in zip(hiddens, weights, strict=True))
    torch.testing.assert_close(total if bias is None else total + bias, head(HIDDEN))


@pytest.mark.parametrize("bias", [True, False])
def test_lora_is_a_part_of_its_own_as_long_as_it_acts(bias: bool) -> None:
    plain = Model(bias).lm_head
    assert_parts(plain, 1)
    assert linear_parts(plain, HIDDEN)[1][0] is plain.weight
    model, head = with_head()
    plain = head.base_layer(HIDDEN)
    assert_parts(head, 2)
    head.merge()
    assert_parts(head, 1)
    assert (head(HIDDEN) - plain).abs().max() > 0.1
    head.enable_adapters(False)  # and merged: its own forward takes the adapter out
    hiddens, weights, bias_ = linear_parts(head, HIDDEN)
    torch.testing.assert_close(hiddens[0] @ weights[0].T + bias_, plain, atol=1e-5, rtol=0)
    assert_parts(head, 1)
    head.enable_adapters(True)
    assert_parts(head, 2)
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["lm_head"]), model, "yours")
    head = model.lm_head
    nn.init.normal_(head.lora_B["yours"].weight)
    head.set_adapter(["mine", "yours"])
    assert_parts(head, 3)
    head.set_adapter("yours")
    assert_parts(head, 2)


class Doubling(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def moved() -> nn.Module:
    head = nn.Linear(8, 11)
    head.forward = lambda x: x
    return head


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (nn.Sequential(nn.Linear(8, 11)), "it ends in Sequential, which is not a linear layer"),
        (Doubling(8, 11), "it ends in Doubling, which is not a linear layer"),
        (moved(), "its forward is replaced"),
        (with_head(use_dora=True)[1], "its adapter 'mine' is DoraLinearVariant, not plain LoRA"),
        (with_head(lora_bias=True)[1], "its adapter 'mine' has a bias"),
    ],
)
def test_what_is_more_than_products_is_named(head: nn.Module, reason: str) -> None:
    assert obstacle(head).startswith(reason)


def test_a_head_that_ranks_share_is_known_by_its_weight() -> None:
    """Tensor parallelism stands in for its forward; what it computes with it is tested in ``test_policy_ranks.py``."""
    head: Any = moved()
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
    head.weight = nn.Parameter(DTensor.from_local(head.weight.detach(), mesh, [Shard(0)], run_check=False))
    assert obstacle(head) == ""
    assert linear_parts(head, HIDDEN)[1][0] is head.weight


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, {}),
        ({"logits_scaling": 4.0}, {"scale": 0.25}),
        ({"lm_head_multiplier": 2}, {"scale": 2.0}),
        ({"final_logit_softcapping": 30.0, "logit_scale": None}, {"soft_cap": 30.0}),
        ({"final_logit_softcapping": None, "logits_scaling": 0}, {}),
    ],
)
def test_transforms_are_read_from_the_config(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert logit_transform(SimpleNamespace(**config)) == LogitTransform(**wanted)
    nested = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config))
    assert logit_transform(nested) == LogitTransform(**wanted)
    assert logit_transform(None) == LogitTransform()
