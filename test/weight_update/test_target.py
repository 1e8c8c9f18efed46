"""What a scheme says of an engine's size is compared with the engine: all of a replica's workers count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.weight_update import VLLMWeightSyncScheme
from torchrl_moe.weight_update.sender import check_numbers


def test_gpus_per_replica_is_tensor_times_pipeline_times_data_parallel() -> None:
    """As TorchRL's documentation has it: 2 * 1 * 1 for ``tp_size=2``."""
    engine = FakeFleet(2)
    engine.infos[:] = [replace(info, tensor_parallel_size=2, pipeline_parallel_size=3) for info in engine.infos]
    check_numbers(engine, VLLMWeightSyncScheme(gpus_per_replica=6).options)
    with pytest.raises(ValueError, match="gpus_per_replica=2, but each replica of the engine has 6 workers"):
        check_numbers(engine, VLLMWeightSyncScheme(gpus_per_replica=2).options)
