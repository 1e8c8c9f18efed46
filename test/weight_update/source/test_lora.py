"""What peft would save of an adapter, and adapters that vLLM would not compute with as peft does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from support.adapters import takes_adapters
from torchrl_moe.store.reader import ADAPTER_FILES
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.weight_update.source import adapter_files, check_adapter

peft = pytest.importorskip("peft")


def tuned(name: str = "default", **config: Any) -> Any:
    config = {"r": 2, "target_modules": ["q_proj", "o_proj"], "init_lora_weights": False, **config}
    return peft.get_peft_model(make_tiny_moe("qwen3_moe"), peft.LoraConfig(**config), adapter_name=name)


@pytest.mark.parametrize("name", ["default", "other"])
def test_the_files_are_those_that_peft_saves(tmp_path: Path, name: str) -> None:
    model = tuned(name)
    check_adapter(model)
    model.save_pretrained(tmp_path)
    saved = tmp_path if name == "default" else tmp_path / name  # where peft puts one of another name
    files = adapter_files(model)
    assert tuple(files) == ADAPTER_FILES
    config, written = json.loads(files[ADAPTER_FILES[0]]), json.loads((saved / ADAPTER_FILES[0]).read_bytes())
    said = {"inference_mode": True, "auto_mapping": written["auto_mapping"]}  # to who trains it, or looks for its model
    assert {**config, **said} == written
    ours, theirs = (
        safetensors.torch.load(files[ADAPTER_FILES[1]]),
        safetensors.torch.load_file(saved / ADAPTER_FILES[1]),
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@takes_adapters
def test_a_transformers_model_with_an_adapter_gives_the_same() -> None:
    model, wrapped = make_tiny_moe("qwen3_moe"), tuned()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    check_adapter(model)
    ours, theirs = (safetensors.torch.load(adapter_files(each)[ADAPTER_FILES[1]]) for each in (model, wrapped))
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: tensor.shape for key, tensor in theirs.items()}


def two_active() -> Any:
    model = tuned()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


def of_another_kind() -> Any:
    return peft.get_peft_model(make_tiny_moe("qwen3_moe"), peft.LoHaConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: make_tiny_moe("qwen3_moe"), ValueError, "sends the adapter of a peft model, got Qwen3MoeForCausalLM"),
        (lambda: nn.Linear(1, 1), ValueError, "got Linear without one: wrap it with peft.get_peft_model"),
        (two_active, ValueError, "sends one adapter, and 2 are active: default, second"),
        (of_another_kind, ValueError, "adapter 'default' is LOHA, vLLM knows LoRA only"),
        (lambda: tuned(rank_pattern={"q_proj": 4}), ValueError, "has rank_pattern, which vLLM's LoRA leaves out"),
        (lambda: tuned(alpha_pattern={"q_proj": 4}), ValueError, "has alpha_pattern"),
        (lambda: tuned(modules_to_save=["lm_head"]), ValueError, "has modules_to_save"),
        (lambda: tuned(init_lora_weights="pissa"), ValueError, "init_lora_weights='pissa' changed the base weights"),
        (lambda: tuned(use_dora=True), TypeError, "not a plain sum of weights"),
        (lambda: tuned(lora_bias=True), TypeError, "not a plain sum of weights"),
    ],
)
def test_what_vllm_would_not_compute_is_refused(make: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        check_adapter(make())


def test_a_sharded_model_is_refused() -> None:
    class Sharded(nn.Parameter):
        def full_tensor(self) -> None: ...

    model = tuned()
    model.base_model.model.lm_head.weight = Sharded(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"sharded \(FSDP2\)"):
        check_adapter(model)
