"""Adapters: what peft would save is what is sent to replicas; those that vLLM would not compute with are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from support.adapters import takes_adapters
from support.weights import Connect, Fleet, weights
from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.modules.policies.unstack import model_metadata
from torchrl_moe.store import WeightStoreReader
from torchrl_moe.store.reader import ADAPTER_FILES
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.weight_update import VLLMWeightSyncScheme
from torchrl_moe.weight_update.options import SourceOptions, StoreOptions
from torchrl_moe.weight_update.publishing import AdapterPublisher, Published
from torchrl_moe.weight_update.source import adapter_files, check_adapter

peft = pytest.importorskip("peft")
KINDS = model_metadata(make_tiny_moe("qwen3_moe"))


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


def sharded() -> Any:
    class Sharded(nn.Parameter):
        def full_tensor(self) -> None: ...

    model = tuned()
    model.base_model.model.lm_head.weight = Sharded(torch.zeros(2, 2))
    return model


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: make_tiny_moe("qwen3_moe"), ValueError, "sends the adapter of a peft model, got Qwen3MoeForCausalLM"),
        (lambda: nn.Linear(1, 1), ValueError, "got Linear without one: wrap it with peft.get_peft_model"),
        (two_active, ValueError, "sends one adapter, and 2 are active: default, second"),
        (of_another_kind, ValueError, "adapter 'default' is LOHA, vLLM knows LoRA only"),
        (sharded, ValueError, r"sharded \(FSDP2\)"),
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


# -- to replicas -----------------------------------------------------------------------------------------------------
@pytest.fixture
def model() -> Any:
    return tuned()


def adapter(model: nn.Module) -> dict[str, Tensor]:
    return safetensors.torch.load(adapter_files(model)["adapter_model.safetensors"])


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@torch.no_grad()
def train(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(1.0)


def test_all_replicas_get_the_adapter_as_it_is_now_and_the_report_says_so(fleet: Fleet, model: Any) -> None:
    engine, sender = fleet(2, expected=KINDS, lora="adapter")
    sender.register_model(model)
    for version in (1, 2, 3):
        train(model)
        report = sender.update_weights()
        assert all(same(fake.weights, adapter(model)) for fake in engine.fakes)
        assert (report.version, report.failed, engine.versions) == (version, {}, [version] * 2)
    contents = adapter_files(model)
    assert report.nbytes == sum(map(len, contents.values())) < model.lm_head.weight.nbytes
    assert [(e.fetched, e.staged, e.paused, e.attempts) for e in report.replicas] == [(0.25, 0.25, 0.0, 1)] * 2
    assert WeightStoreReader(sender.options.store.folder).versions() == [2, 3]  # keep_versions


def test_steps_by_themselves_and_another_model_work_too_and_a_restarted_replica_gets_the_newest(
    fleet: Fleet, model: Any
) -> None:
    engine, sender = fleet(2, expected=KINDS, lora="adapter")
    version, before = sender.publish(model, wait=False), adapter(model)
    train(model)  # it was written at once
    assert sender.wait_published() == version == 1
    assert (sender.apply(version).failed, same(engine.fakes[0].weights, before)) == ({}, True)
    sender.apply(sender.publish(model))
    engine.restart(1)
    sender.bring(1)
    assert all(same(fake.weights, adapter(model)) for fake in engine.fakes)
    assert (engine.states, engine.versions) == (["SERVING"] * 2, [2, 2])


def test_what_has_no_adapter_is_refused(connect: Connect) -> None:
    sender = connect(FakeFleet(1, expected=KINDS), lora="adapter")
    with pytest.raises(ValueError, match="got Qwen3MoeForCausalLM without one"):
        sender.register_model(make_tiny_moe("qwen3_moe"))
    with pytest.raises(RuntimeError, match="no model; call register_model"):
        sender.update_weights()
    with pytest.raises(ValueError, match="sends the adapter of a peft model, got dict"):
        sender.update_weights(weights())


def test_an_adapter_of_another_model_is_refused_whenever_that_is_known(connect: Connect, model: Any) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    engine = FakeFleet(1, expected={name: (torch.float32, torch.Size([8, 64]))})
    words = r"adapter of model\.layers\.1\.self_attn\.q_proj is for .* shape \[\d+, 64\], the engine's is \[8, 64\]"
    early, late = VLLMWeightSyncScheme(lora="adapter").create_sender(), connect(engine, lora="adapter")
    early.register_model(model)
    for act in (
        lambda: early.init_all_workers_group(None, vllm_engine=engine),
        lambda: late.register_model(model),
        lambda: late.publish(model),
    ):
        with pytest.raises(ManifestMismatch, match=words):
            act()
    early.shutdown()


def test_a_base_that_is_stored_in_another_way_is_no_matter(fleet: Fleet, model: Any) -> None:
    engine, sender = fleet(
        1, expected={"model.layers.1.self_attn.q_proj.qweight": (torch.int32, torch.Size([8, 64]))}, lora="adapter"
    )
    sender.register_model(model)
    sender.init_all_workers_group(model_metadata(model), vllm_engine=engine)  # as TorchRL's trainers do
    assert sender.update_weights().failed == {}


def test_of_several_trainers_the_first_writes_and_one_with_an_engine_of_its_own(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrl_moe.weight_update.publishing.is_first", lambda: False)
    store = StoreOptions(folder=tmp_path / "store", seen_as=tmp_path / "store")
    publisher = AdapterPublisher(store, SourceOptions(lora="adapter"), False)
    publisher.register(model)
    assert publisher.publish(None, lambda: 3) == Published(version=3, manifest=None)
    assert not (tmp_path / "store").exists()
    publisher.expect(KINDS, None)
    assert publisher.publish(None, lambda: 3).manifest is not None
    assert publisher.newest() == 3  # from which another one would count on


def test_an_older_adapter_comes_back_under_a_new_number(fleet: Fleet, model: Any) -> None:
    engine, sender = fleet(1, expected=KINDS, lora="adapter")
    sender.register_model(model)
    sender.update_weights()
    before = adapter(model)
    train(model)
    sender.update_weights()
    assert not same(engine.fakes[0].weights, before)
    report = sender.rollback(1)
    assert (report.version, report.failed, same(engine.fakes[0].weights, before)) == (3, {}, True)
    for gone in (1, 9):  # of the past, of the future
        with pytest.raises(ManifestMismatch, match=rf"version {gone} is not there, only \[2, 3\]"):
            sender.rollback(gone)
