"""Fake replicas take weights as engines do, and fail as they are told to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrl_moe.errors import DigestMismatch, EngineError, ManifestMismatch, ReplicaDiedError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Replica, SwapReport
from torchrl_moe.store import WeightStoreWriter
from torchrl_moe.testing.fake_weights import FakeFleet, FakeWeightReplica, SoftError, Stall
from torchrl_moe.weight_update.transports.base import StageOptions
from torchrl_moe.weight_update.transports.gloo import GlooTransport

STAGE: tuple[Any, ...] = ("digest", 1, None)
SWAP: tuple[Any, ...] = ("keep", False, None)
TENSORS = {"a": torch.ones(2, 2), "b": torch.ones(3, dtype=torch.int64)}


@pytest.fixture
def replica(tmp_path: Path) -> FakeWeightReplica:
    replica = FakeWeightReplica(dtype="bfloat16")
    WeightStoreWriter(tmp_path).publish(TENSORS.items(), 1)
    replica.call(Engine.init_weights, 1.0, "memmap", {"folder": str(tmp_path)})
    return replica


def test_it_is_a_replica_that_loads_copies(replica: FakeWeightReplica) -> None:
    assert isinstance(replica, Replica)
    assert replica.wait_ready(1.0).dtype == "bfloat16"
    assert replica.call(Engine.stage_weights, 1.0, 1, *STAGE).nbytes == 40
    assert replica.call(Engine.swap_weights, 1.0, 1, replica.staged, *SWAP).error is None
    assert replica.version == 1
    assert torch.equal(replica.weights["a"], TENSORS["a"])
    assert replica.asked == {"init_weights": 1, "stage_weights": 1, "swap_weights": 1}


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


def test_errors_are_raised_reported_or_never_come(replica: FakeWeightReplica) -> None:
    replica.call(Engine.stage_weights, 1.0, 1, *STAGE)
    replica.fail["swap_weights"] = lambda asked: SoftError("soft", restored=asked == 1) if asked < 2 else None
    reports = [replica.call(Engine.swap_weights, 1.0, 1, replica.staged, *SWAP) for _ in range(3)]
    assert [(report.started, report.error) for report in reports] == [(True, "soft"), (False, "soft"), (True, None)]
    assert isinstance(reports[0], SwapReport)
    replica.fail["stage_weights"] = lambda asked: Stall()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"did not answer 'stage_weights' within 0\.05 s"):
        replica.call(Engine.stage_weights, 0.05, 1, *STAGE)
    assert time.monotonic() - began >= 0.05
    replica.die()
    with pytest.raises(ReplicaDiedError):
        replica.call(Engine.metadata, 1.0)


def test_its_workers_receive_over_gloo_until_it_ends(tmp_path: Path) -> None:
    replica, transport = FakeWeightReplica(workers=2, expected=None), GlooTransport(tmp_path)
    assert replica.wait_ready(1.0).tensor_parallel_size == 2
    manifest = WeightStoreWriter(tmp_path).publish([("any", torch.ones(5))], 3)
    assert transport.stage(replica, manifest, StageOptions(), 20.0).digest == manifest.digest
    assert replica.told("stage_weights")["verify"] == "digest"
    assert len(replica.receivers) == 2
    assert replica.call(Engine.swap_weights, 1.0, 3, replica.staged, *SWAP).error is None
    assert (replica.version, replica.weights["any"].tolist()) == (3, [1.0] * 5)
    replica.shutdown()
    assert replica.receivers == []
    transport.close()


def test_a_fleet_generates_too_and_restarts() -> None:
    with FakeFleet(2, late=[1]) as engine:
        assert engine.states == ["SERVING", "STARTING"]
        assert len(engine.generate([1], {"max_tokens": 2}, use_tqdm=False).outputs[0].token_ids) == 2
        new = engine.restart(0)
        assert engine.replica_table[0].replica is new is engine.fakes[0]
        new.call(Engine.metadata, 1.0)
        assert engine.log[-1] == ("metadata", 0, ["STARTING", "STARTING"])
