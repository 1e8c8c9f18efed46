"""Weights under checkpoint names are those that ``save_pretrained`` writes, bit by bit."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from torchrl_moe.modules import RouterReplay
from torchrl_moe.modules.policies.unstack import ModelWeights, checkpoint_tensors, model_metadata
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
    before, state = copied(checkpoint_tensors(model)), copied(model.state_dict())
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


def test_a_parameter_that_was_replaced_is_found_again() -> None:
    model = make_tiny_moe("mixtral")
    weights = ModelWeights(model)
    before = copied(weights.tensors())
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    assert_same(dict(weights.tensors()), copied(before, 2))


@pytest.mark.parametrize("move", ["another place", "another device", "another layout"])
def test_memory_that_the_model_has_left_is_free_after_the_next_reading(move: str) -> None:
    model = make_tiny_moe("mixtral", num_hidden_layers=1)
    weights, parameter = ModelWeights(model), model.model.layers[0].mlp.experts.down_proj
    dict(weights.tensors())
    left = weakref.ref(parameter.untyped_storage())
    if move == "another device":
        model.to("meta")
    elif move == "another place":
        parameter.data = parameter.data.clone()
    else:
        parameter.data = parameter.data.mT.contiguous().mT
    del parameter
    dict(weights.tensors())
    gc.collect()
    assert left() is None


def test_nothing_of_a_gpu_is_held() -> None:
    model = make_tiny_moe("mixtral", num_hidden_layers=1)
    weights = ModelWeights(model)
    model.to("meta")  # which stands for one here
    dict(weights.tensors())
    left = weakref.ref(model.lm_head.weight.untyped_storage())
    model.to_empty(device="cpu")
    gc.collect()
    assert left() is None


def test_a_tied_name_that_is_asked_for_comes_too_and_costs_no_other_reading() -> None:
    """Ranks that do not know of it (the engine is rank 0's) gather as often as the one that does."""
    model = make_tiny_moe("qwen3_moe", tie_word_embeddings=True)
    weights = ModelWeights(model, also=["lm_head.weight", "of_no_model.weight"])
    assert weights.keys == ModelWeights(model).keys == set(model.state_dict()) - {"lm_head.weight"}
    found = dict(weights.tensors())
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert weights.kinds.keys() == found.keys() == checkpoint_tensors(model).keys() | {"lm_head.weight"}


def test_a_state_dict_with_the_models_own_names_is_cut_alike() -> None:
    model, other = make_tiny_moe("olmoe"), make_tiny_moe("olmoe", seed=1)
    weights = ModelWeights(model)
    assert weights.keys == set(model.state_dict())
    assert_same(dict(weights.tensors(other.state_dict())), checkpoint_tensors(other))


def test_what_is_not_contiguous_is_cut_right() -> None:
    model = make_tiny_moe("qwen3_moe")
    wanted = copied(checkpoint_tensors(model))
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj.data = experts.gate_up_proj.data.mT.contiguous().mT
    assert not experts.gate_up_proj.is_contiguous()
    assert_same(checkpoint_tensors(model), wanted)


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
