"""The memmap transport says where the store is and which version to read, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrl_moe._errors import EngineError
from torchrl_moe.data.weight_store import WeightStoreWriter
from torchrl_moe.testing.fake_weights import FakeWeightReplica
from torchrl_moe.weight_update.transports.memmap import MemmapTransport
from torchrl_moe.weight_update.transports.transport import StageOptions


def test_a_replica_is_told_where_the_store_is_and_how_to_read_a_version(tmp_path: Path) -> None:
    replica, transport = FakeWeightReplica(), MemmapTransport(tmp_path)
    tensors = {"a": torch.ones(2, 2), "b": torch.ones(3, dtype=torch.int64)}
    manifest = WeightStoreWriter(tmp_path).publish(tensors.items(), 4)
    options = StageOptions(stage="shadow", verify="off", threads=3)
    with pytest.raises(EngineError, match="the weight transport is not initialised"):
        transport.stage(replica, manifest, options, 5.0)
    transport.open(replica, 5.0)
    report = transport.stage(replica, manifest, options, 5.0)
    assert (report.digest, report.stage) == (manifest.digest, "shadow")
    staging = {"version": 4, "stage": "shadow", "verify": "off", "threads": 3, "manifest": None}
    assert replica.told("stage_weights") == staging
    transport.close()
