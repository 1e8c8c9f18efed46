"""TorchRL's transport of a scheme that pushes: what is sent arrives in the engine, and can be read."""

from __future__ import annotations

import pytest
import torch

from support.weights import value_in, weights
from torchrl_moe.testing.fake_weights import EXPECTED, FakeFleet
from torchrl_moe.weight_update import VLLMWeightSyncScheme


def test_what_it_sends_arrives_in_the_engine_and_can_be_read() -> None:
    engine, scheme = FakeFleet(2), VLLMWeightSyncScheme(gpus_per_replica=1)
    transport = scheme.create_transport()
    assert (transport.check_connection(), transport.receive_weights()) == (False, None)
    transport.vllm_engine = engine
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


def test_without_an_engine_it_says_what_is_missing() -> None:
    transport = VLLMWeightSyncScheme().create_transport()
    with pytest.raises(RuntimeError, match="no engine: call init_all_workers_group"):
        transport.send_weights("policy", weights())
    with pytest.raises(ValueError, match="vllm_engine must be an AsyncVLLM, got NoneType"):
        transport.init_all_workers_group(EXPECTED)
    with pytest.raises(ValueError, match="gpus_per_replica=2: give it to the scheme"):
        transport.init_all_workers_group(EXPECTED, 2)
    transport.shutdown()
