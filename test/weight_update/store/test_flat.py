"""Bytes of tensors, piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor

from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.weight_update.store.flat import PIECE_BYTES, MappedFile, lay_out, pieces_of, send
from torchrl_moe.weight_update.store.manifest import TensorEntry

BIG = PIECE_BYTES // 4 + 3  # elements of float32


def plain(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(count, dtype=torch.float32) % 1000 for count in (1, 1000, BIG, 2 * BIG)),
        torch.randn(7, 5).mT,
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(9.0)[::2],
        torch.ones(1).expand(9),
    ],
    ids=["one", "many", "big", "bigger", "transposed", "scalar", "empty", "every second", "one many times"],
)
def test_pieces_are_the_bytes_in_order_and_small_and_have_a_digest(tensor: Tensor, dtype: torch.dtype) -> None:
    pieces: list[bytes] = []
    digest = send(tensor, dtype, lambda piece: pieces.append(piece.tobytes()))
    assert (b"".join(pieces), digest) == (plain(tensor.to(dtype)), xxhash.xxh3_64_hexdigest(b"".join(pieces)))
    assert all(len(piece) <= PIECE_BYTES for piece in pieces)


def test_a_tensor_of_its_own_dtype_is_not_copied() -> None:
    tensor = torch.arange(BIG, dtype=torch.float32)
    first, second = pieces_of(tensor, torch.float32)
    assert (first.ctypes.data, second.ctypes.data) == (tensor.data_ptr(), tensor.data_ptr() + PIECE_BYTES)


def test_tensors_lie_one_after_another_at_multiples_of_64() -> None:
    kinds = [(torch.float32, torch.Size([3])), (torch.int8, torch.Size([65])), (torch.bool, torch.Size([0]))]
    assert (lay_out(kinds), lay_out([])) == (([0, 64, 192], 192), ([], 0))


def test_a_mapped_file_knows_when_it_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(128)))
    mapped = MappedFile(path)
    assert mapped.tensor(TensorEntry("a", "uint8", (2, 3), 64, "0" * 16)).tolist() == [[64, 65, 66], [67, 68, 69]]
    assert mapped.is_current()
    path.write_bytes(bytes(range(100)))
    assert not mapped.is_current()
    path.unlink()
    assert not mapped.is_current()


def test_an_empty_file_can_be_mapped_and_a_missing_one_cannot(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    empty = MappedFile(tmp_path / "empty")
    assert empty.tensor(TensorEntry("a", "float32", (0, 2), 0, "0" * 16)).shape == (0, 2)
    with pytest.raises(ManifestMismatch, match="has 0 bytes of tensors, a ends at 4"):
        empty.check(TensorEntry("a", "float32", (), 0, "0" * 16))
    with pytest.raises(ManifestMismatch, match="missing of the weight store cannot be opened: No such file"):
        MappedFile(tmp_path / "missing")
