"""The memmap transport: replicas read the store themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrl_moe.errors import EngineError, ManifestMismatch
from torchrl_moe.testing.fake_weights import FakeWeightReplica
from torchrl_moe.weight_update.store import WeightStoreWriter
from torchrl_moe.weight_update.transports.base import StageOptions
from torchrl_moe.weight_update.transports.registry import MemmapReceiver, MemmapTransport


def test_a_replica_is_told_where_the_store_is_and_how_to_read_a_version(tmp_path: Path) -> None:
    replica, transport = FakeWeightReplica(), MemmapTransport(tmp_path)
    tensors = {"a": torch.ones(2, 2), "b": torch.ones(3, dtype=torch.int64)}
    manifest = WeightStoreWriter(tmp_path).publish(tensors.items(), 4)
    options = StageOptions(verify="off", threads=3)
    with pytest.raises(EngineError, match="the weight transport is not initialised"):
        transport.stage(replica, manifest, options, 5.0)
    transport.open(replica, 5.0)
    report = transport.stage(replica, manifest, options, 5.0)
    assert report.digest == manifest.digest
    staging = {"version": 4, "verify": "off", "threads": 3, "manifest": None}
    assert replica.told("stage_weights") == staging
    transport.close()


def test_a_published_version_is_read_where_it_lies(tmp_path: Path) -> None:
    published = WeightStoreWriter(tmp_path).publish([("w", torch.arange(4.0))], 5)
    receiver = MemmapReceiver(str(tmp_path))
    manifest = receiver.manifest(5)
    assert manifest == published
    receiver.fetch(manifest, verify=True, threads=1)
    with receiver.reading(manifest) as tensors:
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"w": [0.0, 1.0, 2.0, 3.0]}
    receiver.close()
    receiver.close()
    with pytest.raises(ManifestMismatch, match="version 6 is not in the store"):
        receiver.manifest(6)
