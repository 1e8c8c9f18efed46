"""TorchRL's receiver and transport of a scheme that pushes, and numbers of an engine that it must fit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.weights import Connect, value_in, weights
from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.testing.fake_weights import EXPECTED, FakeFleet
from torchrl_moe.weight_update import VLLMWeightSyncScheme
from torchrl_moe.weight_update.sender import check_numbers


def test_both_sides_of_torchrls_script_in_two_processes_run(connect: Connect) -> None:
    """Each side has a scheme of its own there; neither waits for the other."""
    engine, arguments = FakeFleet(2), {"master_port": 29500, "gpus_per_replica": 1, "num_replicas": 2}
    receiver = VLLMWeightSyncScheme(**arguments).create_receiver(engine)  # type: ignore[arg-type]
    receiver.init_all_workers_group(EXPECTED)
    sender = connect(engine, **arguments)
    assert receiver.poll_and_apply() is False
    sender.update_weights(weights(2))
    receiver.apply_weights()
    assert receiver.poll_and_apply(timeout=0.1) is True
    assert receiver.poll_and_apply() is False
    assert receiver.version == 1
    with pytest.raises(ValueError, match=r"applies no weights: .* Call sender.update_weights\(weights\)"):
        receiver.apply_weights(weights())
    with pytest.raises(ValueError, match="inplace=True"):
        receiver.apply_weights(inplace=False)


def test_what_does_not_fit_is_said_before_the_sender_comes() -> None:
    engine = FakeFleet(2)
    receiver = VLLMWeightSyncScheme(num_replicas=2).create_receiver(engine)
    with pytest.raises(ManifestMismatch, match=r"a has shape \[3\], the engine expects \[2, 2\]"):
        receiver.init_all_workers_group({**EXPECTED, "a": (torch.float32, torch.Size([3]))})
    with pytest.raises(ManifestMismatch, match="metadata does not name the engine's checkpoint tensors"):
        receiver.init_all_workers_group({"c": EXPECTED["a"]})
    with pytest.raises(ValueError, match="num_replicas=3, but the engine has 2"):
        VLLMWeightSyncScheme(num_replicas=3).create_receiver(engine).init_all_workers_group()
    VLLMWeightSyncScheme(lora="adapter").create_receiver(engine).init_all_workers_group({"lora": EXPECTED["a"]})
    with pytest.raises(ValueError, match="must be an AsyncVLLM, got SimpleNamespace: pass what torchrl_moe"):
        VLLMWeightSyncScheme().create_receiver(SimpleNamespace(actors=[]))


def test_what_it_sends_arrives_in_the_engine_and_can_be_read() -> None:
    engine, scheme = FakeFleet(2), VLLMWeightSyncScheme(gpus_per_replica=1)
    transport = scheme.create_transport()
    assert (transport.check_connection(), transport.receive_weights()) == (False, None)
    with pytest.raises(RuntimeError, match="no engine: call init_all_workers_group"):
        transport.send_weights("policy", weights())
    with pytest.raises(ValueError, match="vllm_engine must be an AsyncVLLM, got NoneType"):
        transport.init_all_workers_group(EXPECTED)
    transport.vllm_engine = engine
    with pytest.raises(ValueError, match="gpus_per_replica=2: give it to the scheme"):
        transport.init_all_workers_group(EXPECTED, 2)
    transport.init_all_workers_group(EXPECTED, gpus_per_replica=1)
    assert transport.check_connection()
    for value in (1, 2):
        transport.send_weights("policy", weights(value))
        assert value_in(engine, 1) == value
        found = transport.receive_weights(timeout=None)
        assert found is not None
        assert torch.equal(found["b"], torch.full((3,), value))
    folder = scheme.folder
    transport.shutdown()
    transport.shutdown()
    assert not folder.exists()


def test_gpus_per_replica_is_tensor_times_pipeline_times_data_parallel() -> None:
    """As TorchRL's documentation has it: 2 * 1 * 1 for ``tp_size=2``."""
    engine = FakeFleet(2)
    engine.infos[:] = [replace(info, tensor_parallel_size=2, pipeline_parallel_size=3) for info in engine.infos]
    check_numbers(engine, VLLMWeightSyncScheme(gpus_per_replica=6).options)
    with pytest.raises(ValueError, match="gpus_per_replica=2, but each replica of the engine has 6 workers"):
        check_numbers(engine, VLLMWeightSyncScheme(gpus_per_replica=2).options)
