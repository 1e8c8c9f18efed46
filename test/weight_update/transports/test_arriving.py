"""Flat bytes as tensors, and the digests of what has arrived so far."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrl_moe.errors import DigestMismatch
from torchrl_moe.weight_update.store import WeightStoreReader, WeightStoreWriter
from torchrl_moe.weight_update.transports.gloo import Digests, as_tensor, tensor_in

TENSORS = {"a": torch.arange(100.0).view(10, 10), "b": torch.tensor(2.5, dtype=torch.bfloat16), "c": torch.empty(0, 3)}


def test_bytes_are_a_tensor_without_a_copy() -> None:
    flat = np.arange(5, dtype=np.uint8)
    seen = as_tensor(flat)
    flat[0] = 9
    assert (seen.tolist(), as_tensor(flat[:0]).shape) == ([9, 1, 2, 3, 4], (0,))


def test_tensors_lie_where_the_manifest_says_and_have_their_shape(tmp_path: Path) -> None:
    writer = WeightStoreWriter(tmp_path)
    manifest = writer.publish(TENSORS.items(), 1)
    with WeightStoreReader(tmp_path).flat(manifest) as flat:
        for entry in manifest.entries:
            found = tensor_in(as_tensor(flat), entry)
            assert (found.dtype, found.shape) == (TENSORS[entry.name].dtype, TENSORS[entry.name].shape)
            assert torch.equal(found, TENSORS[entry.name])
    writer.close()


@pytest.mark.parametrize("with_pool", [True, False])
def test_only_what_has_arrived_is_compared_and_nothing_without_a_pool(tmp_path: Path, with_pool: bool) -> None:
    writer = WeightStoreWriter(tmp_path)
    manifest = writer.publish(TENSORS.items(), 1)
    with WeightStoreReader(tmp_path).flat(manifest) as flat:
        arrived = torch.from_numpy(flat.copy())
    writer.close()
    last = manifest.entries[1]
    assert (last.name, last.nbytes, last.end >= manifest.entries[0].end) == ("b", 2, True)
    arrived[last.offset] ^= 1
    with ThreadPoolExecutor(1) as pool:
        digests = Digests(manifest, arrived, pool if with_pool else None)
        digests.arrived(last.offset)
        digests.result()  # the byte that is wrong is not there yet
        digests.arrived(last.end)
        if not with_pool:
            digests.result()
            return
        with pytest.raises(DigestMismatch, match=f"version 1: bytes of {last.name} are not those published"):
            digests.result()
