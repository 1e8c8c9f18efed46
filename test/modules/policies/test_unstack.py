"""Weights under checkpoint names are those that ``save_pretrained`` writes, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from torchrl_moe.modules import RouterReplay
from torchrl_moe.modules.policies.unstack import checkpoint_tensors, model_metadata
from torchrl_moe.testing import make_tiny_moe

FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"]


def assert_same(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    assert tensors.keys() == saved.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == saved[name].dtype, name
        assert torch.equal(tensor, saved[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_those_of_save_pretrained(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_tiny_moe(family, dtype=dtype)
    model.save_pretrained(tmp_path)
    assert_same(checkpoint_tensors(model), load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_of_now(family: str) -> None:
    model = make_tiny_moe(family)
    before = {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.mul_(2)
    after = checkpoint_tensors(model)
    assert all(torch.equal(after[name], 2 * before[name]) for name in before)


def test_tied_embeddings_come_once(tmp_path: Path) -> None:
    model = make_tiny_moe("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = checkpoint_tensors(model)
    assert "lm_head.weight" not in tensors
    assert_same(tensors, load_file(tmp_path / "model.safetensors"))


def test_buffers_count() -> None:
    model = make_tiny_moe("deepseek_v3")
    biases = {name: tensor for name, tensor in checkpoint_tensors(model).items() if "correction_bias" in name}
    assert len(biases) == 3
    assert all(tensor.any() for tensor in biases.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_router_replay_changes_nothing(family: str) -> None:
    model = make_tiny_moe(family)
    plain = {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}
    replay = RouterReplay(model)
    assert_same(checkpoint_tensors(model), plain)
    replay.remove()


def test_the_model_stays_as_it_was() -> None:
    model = make_tiny_moe("mixtral")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint_tensors(model)
    assert_same(dict(model.state_dict()), before)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_compiled_model_is_looked_through() -> None:
    model = make_tiny_moe("qwen3_moe")
    assert_same(checkpoint_tensors(torch.compile(model)), checkpoint_tensors(model))


@pytest.mark.parametrize("adapted", [{"get_base_model": lambda: None}, {"_hf_peft_config_loaded": True}])
def test_adapters_must_be_merged_first(adapted: dict[str, object]) -> None:
    model = make_tiny_moe()
    for name, value in adapted.items():
        nn.Module.__setattr__(model, name, value)
    with pytest.raises(TypeError, match=r"a peft model has adapters .*: merge them first, model\.merge_and_unload"):
        checkpoint_tensors(model)


def test_metadata_is_of_the_same_tensors() -> None:
    model = make_tiny_moe("deepseek_v3", dtype=torch.bfloat16)
    expected = {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint_tensors(model).items()}
    assert model_metadata(model) == expected
    assert {dtype for dtype, _ in expected.values()} == {torch.bfloat16, torch.float32}
