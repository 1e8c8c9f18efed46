"""The worker's end of nccl: how vLLM's engine is asked. What it does with that takes two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrl_moe._errors import ManifestMismatch, WeightSyncError
from torchrl_moe.data.weight_store import Manifest
from torchrl_moe.modules.backends.vllm.receivers.nccl import NcclReceiver, update_info
from torchrl_moe.modules.backends.vllm.receivers.receiver import open_receiver

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
    from torchrl_moe.data.weight_store import WeightStoreWriter

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
