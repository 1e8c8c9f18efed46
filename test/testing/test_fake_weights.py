"""Fake replicas take weights as engines do, and fail as they are told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchrl_moe.errors import DigestMismatch, EngineError, ManifestMismatch
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.store import WeightStoreWriter
from torchrl_moe.testing.fake_weights import FakeWeightReplica

STAGE: tuple[Any, ...] = ("digest", 1, None)
SWAP: tuple[Any, ...] = ("keep", False, None)
TENSORS = {"a": torch.ones(2, 2), "b": torch.ones(3, dtype=torch.int64)}


@pytest.fixture
def replica(tmp_path: Path) -> FakeWeightReplica:
    replica = FakeWeightReplica(dtype="bfloat16")
    WeightStoreWriter(tmp_path).publish(TENSORS.items(), 1)
    replica.call(Engine.init_weights, 1.0, "memmap", {"folder": str(tmp_path)})
    return replica


def test_it_checks_names_and_bytes_and_wants_its_transport_opened(replica: FakeWeightReplica, tmp_path: Path) -> None:
    file = tmp_path / "v1.safetensors"
    content, start = file.read_bytes(), len(file.read_bytes()) - 40
    file.write_bytes(content[:start] + b"x" + content[start + 1 :])
    with pytest.raises(DigestMismatch, match="bytes of a"):
        replica.call(Engine.stage_weights, 1.0, 1, *STAGE)
    replica.call(Engine.stage_weights, 1.0, 1, "off", 1, None)
    with pytest.raises(ManifestMismatch, match="2 missing"):
        replica._expected = {"x": TENSORS["a"], "y": TENSORS["b"]}  # type: ignore[assignment]
        replica.call(Engine.stage_weights, 1.0, 1, *STAGE)
    with pytest.raises(EngineError, match="the fake engine has no transport 'mpi'"):
        FakeWeightReplica().call(Engine.init_weights, 1.0, "mpi", {})
    with pytest.raises(EngineError, match="the weight transport is not initialised"):
        FakeWeightReplica().call(Engine.stage_weights, 1.0, 1, *STAGE)
