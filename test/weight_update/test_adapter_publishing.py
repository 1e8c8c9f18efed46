"""Adapters from the registered model to fake replicas: what is sent, what the report says, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from support.weights import Connect, Fleet, always, weights
from torchrl_moe.errors import ManifestMismatch, WeightSyncError
from torchrl_moe.modules.policies.unstack import model_metadata
from torchrl_moe.store import WeightStoreReader, copy_adapter
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.weight_update import VLLMWeightSyncScheme
from torchrl_moe.weight_update.options import SourceOptions, StoreOptions
from torchrl_moe.weight_update.publishing import AdapterPublisher, Published
from torchrl_moe.weight_update.source import adapter_files

peft = pytest.importorskip("peft")
KINDS = model_metadata(make_tiny_moe("qwen3_moe"))


@pytest.fixture
def model() -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(make_tiny_moe("qwen3_moe"), config)


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


def test_steps_by_themselves_and_another_model_work_too(fleet: Fleet, model: Any) -> None:
    engine, sender = fleet(1, expected=KINDS, lora="adapter")
    version = sender.publish(model, wait=False)
    train(model)  # it was written at once
    assert sender.wait_published() == version == 1
    assert sender.apply(version).failed == {}
    assert not same(engine.fakes[0].weights, adapter(model))
    sender.apply(sender.publish(model))
    assert same(engine.fakes[0].weights, adapter(model))


def test_a_restarted_replica_gets_the_newest_adapter(fleet: Fleet, model: Any) -> None:
    engine, sender = fleet(2, expected=KINDS, lora="adapter")
    sender.register_model(model)
    sender.update_weights()
    new = engine.restart(1)
    sender.bring(1)
    assert same(new.weights, adapter(model))
    assert (engine.states, engine.versions) == (["SERVING"] * 2, [1, 1])


def test_an_engine_without_lora_says_so_at_once(connect: Connect) -> None:
    engine = FakeFleet(1)
    engine.fakes[0].fail["init_weights"] = always(ValueError("pass enable_lora=True"))
    with pytest.raises(ValueError, match="pass enable_lora=True"):
        connect(engine, lora="adapter")


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


def test_of_several_trainers_only_the_first_writes(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_moe.weight_update.publishing.is_first", lambda: False)
    store = StoreOptions(folder=tmp_path / "store", seen_as=tmp_path / "store")
    writer, other = (AdapterPublisher(store, SourceOptions(lora="adapter"), False) for _ in range(2))
    writer.register(model)
    assert writer.publish(None, lambda: 3) == Published(version=3, manifest=None)
    assert not (tmp_path / "store").exists()
    for each in (writer, other):
        each.expect(KINDS, None)  # one with an engine of its own
    assert (writer.newest(), other.newest()) == (-1, -1)
    assert writer.publish(None, lambda: 3).manifest is not None
    assert other.newest() == 3  # from which it would count on
    with pytest.raises(WeightSyncError, match="one trainer per folder"):
        other.publish(model, lambda: 4)
    writer.close()
    writer.close()
    assert other.publish(model, lambda: 4).manifest is not None


@pytest.mark.parametrize("other_sender", [False, True])
def test_an_older_adapter_is_published_again_under_a_new_number(tmp_path: Path, model: Any, other_sender: bool) -> None:
    store = StoreOptions(folder=tmp_path / "store", seen_as=tmp_path / "store")
    publisher = AdapterPublisher(store, SourceOptions(lora="adapter"), False)
    first, before = publisher.publish(model, lambda: 1), adapter_files(model)
    train(model)
    publisher.publish(model, lambda: 2)
    if other_sender:
        publisher.close()
        publisher = AdapterPublisher(store, SourceOptions(lora="adapter"), False)
    again = publisher.republish(1, lambda: 3)
    assert again.manifest is not None
    assert first.manifest is not None
    assert (again.version, again.manifest.digest) == (3, first.manifest.digest)
    publisher.publish(model, lambda: 4)
    (tmp_path / "copy").mkdir()
    copy_adapter(store.folder, 3, tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == before
    with pytest.raises(ManifestMismatch, match="version 9 is not there"):
        publisher.republish(9, lambda: 10)
