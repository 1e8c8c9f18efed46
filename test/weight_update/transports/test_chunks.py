"""Cutting a version's bytes: where, and what lies in a piece."""

from __future__ import annotations

import pytest
import torch

from torchrl_moe._errors import DigestMismatch
from torchrl_moe.weight_update.store import Manifest, TensorEntry
from torchrl_moe.weight_update.store.flat import send
from torchrl_moe.weight_update.transports.chunks import Chunk, chunks_of


def test_chunks_hold_whole_tensors_and_no_more_bytes_than_asked_for_but_for_a_larger_tensor() -> None:
    places = [(0, 100), (128, 28), (192, 300), (512, 10), (576, 0)]
    entries = [TensorEntry(str(i), "uint8", (size,), offset, "") for i, (offset, size) in enumerate(places)]
    chunks = chunks_of(Manifest(1, 0, tuple(reversed(entries))), 156)
    assert [[entry.name for entry in chunk.entries] for chunk in chunks] == [["0", "1"], ["2"], ["3", "4"]]
    assert [(chunk.span, chunk.size) for chunk in chunks] == [
        (slice(0, 156), 156),
        (slice(192, 492), 300),
        (slice(512, 576), 64),
    ]
    assert chunks_of(Manifest(1, 0, ()), 128) == []


def test_tensors_are_views_of_the_bytes_and_are_compared_with_their_digests() -> None:
    scale, names = torch.tensor(0.5), torch.arange(6, dtype=torch.int16).view(2, 3)
    digests = [send(tensor, tensor.dtype, lambda piece: None) for tensor in (scale, names)]
    chunk = Chunk(
        (
            TensorEntry("scale", "float32", (), 640, digests[0]),
            TensorEntry("names", "int16", (2, 3), 704, digests[1]),
            TensorEntry("none", "float64", (0, 4), 768, send(torch.empty(0), torch.float64, lambda piece: None)),
        )
    )
    flat = torch.zeros(chunk.size, dtype=torch.uint8)
    flat[:4], flat[64:76] = scale.view(1).view(torch.uint8), names.view(-1).view(torch.uint8)
    chunk.verify(7, flat)
    found = dict(chunk.tensors(flat))
    assert torch.equal(found["scale"], scale)
    assert torch.equal(found["names"], names)
    assert (found["none"].shape, found["none"].dtype) == ((0, 4), torch.float64)
    assert found["names"].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    flat[64] ^= 1
    with pytest.raises(DigestMismatch, match="version 7: bytes of names are not those published"):
        chunk.verify(7, flat)
