"""The nccl transport, with vLLM's engines in fakes; and over two GPUs, that bytes arrive."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from support.waiting import until
from torchrl_moe._errors import ManifestMismatch, WeightSyncError
from torchrl_moe.testing.fake_weights import FakeWeightReplica
from torchrl_moe.weight_update.store import Manifest, WeightStoreWriter
from torchrl_moe.weight_update.transports.base import StageOptions
from torchrl_moe.weight_update.transports.nccl import NcclReceiver, NcclTrainer, NcclTransport, ready_key, update_info
from torchrl_moe.weight_update.transports.registry import open_receiver

# -- the trainer's end ------------------------------------------------------------------------------------------------


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
    replica.command_init_weights = lambda **_: None  # type: ignore[method-assign]
    return replica


@pytest.fixture
def transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclTransport]:
    FakeTrainer.made = []
    monkeypatch.setattr("torchrl_moe.weight_update.transports.nccl.NcclTrainer", FakeTrainer)
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


# -- a worker's end ---------------------------------------------------------------------------------------------------


pytest.importorskip("vllm")

JSON_OPTIONS = {
    "master_address": "127.0.0.1",
    "master_port": 29500,
    "rank_offset": 1,
    "world_size": 3,
    "packed": True,
    "packed_buffer_size_bytes": 1 << 20,
    "packed_num_buffers": 2,
}


class Worker:
    """What a receiver wants to know of the weight engine that opens it."""

    config, vllm_config = "a config", "another"

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=2, rank=1)
        self.loaded: list[str] = []
        self.model = SimpleNamespace(load_weights=self.load_weights)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> set[str]:
        self.loaded += [name for name, _ in weights]
        return set(self.loaded)


class FakeEngine:
    """vLLM's, without NCCL: it gives the model one tensor per name, in two goes."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        assert (config, vllm_config, device.type) == ("a config", "another", "cuda")
        self.model, self.log = model, list[Any]()
        store = SimpleNamespace(set=lambda key, value: self.log.append(key))
        self.model_update_group = SimpleNamespace(group=SimpleNamespace(store=store))

    def init_transfer_engine(self, info: Any) -> None:
        self.log.append(info)

    def receive_weights(self, info: Any) -> None:
        self.log.append((info.names, info.dtype_names, info.shapes))
        half = len(info.names) // 2
        for names in (info.names[:half], info.names[half:]):
            self.model.load_weights((name, None) for name in names)

    def shutdown(self) -> None:
        self.log.append("shutdown")


@pytest.fixture
def manifest(tmp_path: Any) -> Manifest:
    from torchrl_moe.weight_update.store import WeightStoreWriter

    tensors = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.zeros((), dtype=torch.int64),
    }
    return WeightStoreWriter(tmp_path).publish(tensors.items(), 3)


def test_vllm_is_told_names_dtypes_and_shapes_in_order(manifest: Manifest) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    info = update_info(manifest)
    assert info == {
        "names": ["a", "b", "c"],
        "dtype_names": ["float32", "bfloat16", "int64"],
        "shapes": [[2, 3], [4], []],
    }
    NCCLWeightTransferUpdateInfo(**info)


def test_a_worker_without_a_gpu_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="needs workers with GPUs, this one computes on cpu: use 'gloo'"):
        open_receiver("nccl", JSON_OPTIONS, Worker("cpu"))


def test_a_load_is_announced_received_and_counted(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    monkeypatch.setattr(nccl_engine, "NCCLWeightTransferEngine", FakeEngine)
    worker = Worker()
    receiver = open_receiver("nccl", {**JSON_OPTIONS, "timeout_seconds": 9.0}, worker)
    assert isinstance(receiver, NcclReceiver)
    log = receiver._engine.log
    (info,) = log
    assert (info.master_address, info.master_port, info.rank_offset, info.world_size) == ("127.0.0.1", 29500, 1, 3)
    assert info.packed
    receiver.fetch(manifest, verify=True, threads=1)
    for load in (0, 1):
        assert receiver.load(manifest) == 3
        assert log[-2:] == [
            f"torchrl_moe/ready/{load}/2",
            (["a", "b", "c"], ["float32", "bfloat16", "int64"], [[2, 3], [4], []]),
        ]
    assert worker.loaded == ["a", "b", "c"] * 2
    receiver.close()
    assert log[-1] == "shutdown"


def test_nothing_is_held_to_be_read(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    monkeypatch.setattr(nccl_engine, "NCCLWeightTransferEngine", FakeEngine)
    receiver = open_receiver("nccl", JSON_OPTIONS, Worker())
    with pytest.raises(ManifestMismatch, match="version 3 was not staged"):
        receiver.manifest(3)
    with pytest.raises(WeightSyncError, match="nccl sends during the pause"):
        receiver.reading(manifest)


# -- vLLM's trainer engine --------------------------------------------------------------------------------------------


pytest.importorskip("vllm")


CPU = torch.device("cpu")


class FakeTrainerEngine:
    """vLLM's, without NCCL: it sends what the source gives, in its order, between the client's steps."""

    def __init__(self, info: Any, client: Any, source: Any) -> None:
        self.info, self.client, self.source = info, client, source
        self.sent: list[Any] = []
        self.closed = False
        self.set = set[str]()
        store = SimpleNamespace(check=lambda keys: set(keys) <= self.set)
        self.model_update_group = SimpleNamespace(group=SimpleNamespace(store=store))
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": info.world_size})

    def send_weights(self) -> None:
        self.client.start_weight_update()
        metadata = [(meta.name, meta.dtype, meta.shape) for meta in self.source.metadata()]
        self.client.update_weights({})
        self.sent.append((metadata, dict(self.source)))
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.closed = True


def test_the_engine_meets_the_workers_and_sends_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        NCCLTrainerWeightTransferEngine,
        "trainer_init",
        classmethod(lambda cls, info, *, client, source: FakeTrainerEngine(info, client, source)),
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    options: list[dict[str, Any]] = []
    trainer = NcclTrainer(options.append, "127.0.0.1", 29501, 3, CPU)
    engine: Any = trainer._engine
    assert options == [{"rank_offset": 1, "world_size": 3}]
    info = engine.info
    assert (info.master_address, info.master_port, info.world_size, info.rank) == ("127.0.0.1", 29501, 3, 0)
    assert info.is_sender
    engine.set = {ready_key(0, 1)}
    assert not trainer.is_ready(0)
    engine.set |= {ready_key(0, 2), ready_key(1, 1)}
    assert trainer.is_ready(0)
    assert not trainer.is_ready(1)
    trainer.send({"b": torch.ones(2), "a": torch.zeros(1, 3, dtype=torch.bfloat16)})
    ((metadata, tensors),) = engine.sent
    assert metadata == [("b", torch.float32, (2,)), ("a", torch.bfloat16, (1, 3))]
    assert list(tensors) == ["b", "a"]
    assert torch.equal(tensors["b"], torch.ones(2))
    assert list(engine.source) == []  # nothing of a version is kept
    trainer.close()
    assert engine.closed


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_bytes_arrive_on_another_gpu() -> None:
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    sent = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    got: dict[str, torch.Tensor] = {}
    threads: list[threading.Thread] = []

    def work(options: dict[str, Any]) -> None:
        torch.cuda.set_device(1)
        group = stateless_init_process_group(options["master_address"], options["master_port"], 1, 2, 1)
        group.group.store.set(ready_key(0, 1), b"")
        packed_nccl_broadcast_consumer(
            iterator=iter([(name, (tensor.shape, tensor.dtype)) for name, tensor in sent.items()]),
            group=group,
            src=0,
            post_unpack_func=lambda pairs: got.update({name: tensor.cpu() for name, tensor in pairs}),
            buffer_size_bytes=options["packed_buffer_size_bytes"],
            num_buffers=options["packed_num_buffers"],
            device=torch.device("cuda", 1),
        )

    def init(options: dict[str, Any]) -> None:
        threads.append(threading.Thread(target=work, args=(options,)))
        threads[0].start()

    trainer = NcclTrainer(init, "127.0.0.1", 29502, 2, torch.device("cuda", 0))
    while not trainer.is_ready(0):
        pass
    trainer.send(sent)
    threads[0].join(60)
    trainer.close()
    assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())
