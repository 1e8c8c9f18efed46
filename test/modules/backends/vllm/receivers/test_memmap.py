"""The weight store, seen by a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrl_moe._errors import ManifestMismatch
from torchrl_moe.data.weight_store import WeightStoreWriter
from torchrl_moe.modules.backends.vllm.receivers.memmap import MemmapReceiver


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
