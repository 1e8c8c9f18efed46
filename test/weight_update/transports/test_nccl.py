"""The trainer's end of nccl: what it refuses, and when it sends. The sending itself takes two GPUs."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from support.waiting import until
from torchrl_moe._errors import WeightSyncError
from torchrl_moe.data.weight_store import WeightStoreWriter
from torchrl_moe.testing.fake_weights import FakeWeightReplica
from torchrl_moe.weight_update.transports.nccl import NcclTransport
from torchrl_moe.weight_update.transports.transport import StageOptions

SECONDS = 20.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a CUDA device")
def test_a_trainer_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"needs a CUDA device in the trainer, .* use transport='gloo'"):
        NcclTransport(tmp_path)


class FakeTrainer:
    """In the place of vLLM's NCCL: workers are ready when a test says so."""

    made: list[FakeTrainer]

    def __init__(self, init: Any, address: str, port: int, world_size: int, device: torch.device) -> None:
        self.where = address, world_size, device
        self.init = init  # as vLLM's engine keeps its client
        init({"master_port": port})
        self.ready = 0
        self.sent: list[dict[str, Tensor]] = []
        self.closed = threading.Event()
        FakeTrainer.made.append(self)

    def is_ready(self, load: int) -> bool:
        return load < self.ready

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        self.sent.append({name: tensor.clone() for name, tensor in tensors.items()})

    def close(self) -> None:
        self.closed.set()


def gpu_replica() -> FakeWeightReplica:
    """A fake with two workers that would meet the trainer, had they GPUs."""
    replica = FakeWeightReplica(workers=2, expected=None)
    replica.command_init_weights = lambda transport, options: None  # type: ignore[method-assign]
    return replica


@pytest.fixture
def transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclTransport]:
    FakeTrainer.made = []
    module = ModuleType("nccl_trainer")
    module.NcclTrainer = FakeTrainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchrl_moe.modules.backends.vllm.nccl_trainer", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = NcclTransport(tmp_path, address="127.0.0.1", device="cpu")
    yield made
    made.close()


def until_sent(trainer: FakeTrainer, count: int) -> None:
    until(lambda: len(trainer.sent) >= count, SECONDS)


def test_a_version_is_sent_when_the_workers_wait_and_again_when_they_do(
    transport: NcclTransport, tmp_path: Path
) -> None:
    replica, store = gpu_replica(), WeightStoreWriter(tmp_path)
    manifest = store.publish([("w", torch.ones(3)), ("b", torch.zeros(2))], 1)
    report = transport.stage(replica, manifest, StageOptions(threads=3), SECONDS)
    assert report.reason
    (trainer,) = FakeTrainer.made
    assert trainer.where == ("127.0.0.1", 3, torch.device("cpu"))
    (opened, options), (staged, arguments) = replica.calls
    assert (opened, options["transport"], options["options"]["master_port"] > 0) == ("init_weights", "nccl", True)
    assert staged == "stage_weights"
    assert arguments == {
        "version": 1,
        "stage": "auto",
        "verify": "off",
        "threads": 3,
        "manifest": manifest.to_json(),
    }
    time.sleep(0.05)
    assert trainer.sent == []
    for attempt in (1, 2):
        trainer.ready = attempt
        until_sent(trainer, attempt)
    assert [list(tensors) for tensors in trainer.sent] == [["w", "b"]] * 2
    assert torch.equal(trainer.sent[0]["w"], torch.ones(3))
    manifest = store.publish([("w", torch.full((3,), 5.0))], 2)
    transport.stage(replica, manifest, StageOptions(), SECONDS)
    trainer.ready = 3
    until_sent(trainer, 3)
    assert torch.equal(trainer.sent[2]["w"], torch.full((3,), 5.0))


def test_a_group_that_broke_is_told_of_at_once_and_met_anew_at_the_next_version(
    transport: NcclTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replica, store = gpu_replica(), WeightStoreWriter(tmp_path)
    transport.stage(replica, store.publish([("w", torch.ones(3))], 1), StageOptions(), SECONDS)
    (broken,) = FakeTrainer.made

    def fail(tensors: Mapping[str, Tensor]) -> None:
        raise RuntimeError("NCCL error: remote process exited")

    monkeypatch.setattr(broken, "send", fail)
    broken.ready = 1
    until(lambda: transport._links[replica].broken, SECONDS)
    assert "RuntimeError: NCCL error: remote process exited" in capsys.readouterr().err
    transport.stage(replica, store.publish([("w", torch.zeros(3))], 2), StageOptions(), SECONDS)
    first, second = FakeTrainer.made
    assert first.closed.is_set()
    second.ready = 1
    until_sent(second, 1)
    assert torch.equal(second.sent[0]["w"], torch.zeros(3))


def test_a_replica_that_is_gone_takes_its_group_and_thread_with_it(transport: NcclTransport) -> None:
    replica = gpu_replica()
    transport.open(replica, SECONDS)
    (trainer,) = FakeTrainer.made
    threads = [thread for thread in threading.enumerate() if thread.name == "weight-sender"]
    del replica
    gc.collect()
    assert trainer.closed.is_set()
    assert not any(thread.is_alive() for thread in threads)


def test_each_replica_has_a_group_of_its_own_which_a_new_one_replaces(transport: NcclTransport) -> None:
    one, other = gpu_replica(), gpu_replica()
    for replica in (one, other, one):
        transport.open(replica, SECONDS)
    first, second, third = FakeTrainer.made
    assert [trainer.closed.is_set() for trainer in (first, second, third)] == [True, False, False]
    transport.close()
    transport.close()
    assert second.closed.is_set()
    assert third.closed.is_set()
