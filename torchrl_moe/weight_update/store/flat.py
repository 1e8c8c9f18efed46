"""Bytes: tensors cut into pieces that are hashed and copied while in cache, and files mapped without a copy.

Hashing brings a piece into the cache, from where it is copied, so both cost no more than the copy alone. There it is
also looked through for numbers that are not finite: as integers, NaN and infinity are larger than all other numbers.
numpy copies, because torch's threads on a busy host cost a hundred times what they gain.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from torchrl_moe.errors import DigestMismatch, ManifestMismatch, WeightSyncError
from torchrl_moe.weight_update.store.manifest import Manifest, TensorEntry, TensorKind, in_lines

__all__ = [
    "ALIGNMENT",
    "LENGTH_BYTES",
    "PIECE_BYTES",
    "SAFETENSORS",
    "Bytes",
    "CheckedTensors",
    "MappedFile",
    "check_digest",
    "header_end",
    "is_finite",
    "lay_out",
    "not_published",
    "pieces_of",
    "read_header",
    "send",
    "verify_entries",
    "write_header",
]

Bytes = NDArray[np.uint8]
Buffer = bytes | memoryview
PIECE_BYTES = 4 << 20
ALIGNMENT = 64
SAFETENSORS, LENGTH_BYTES, MOST_HEADER_BYTES = ".safetensors", 8, 100_000_000  # as its own readers have it
CAST_ELEMENTS = 1 << 15  # at most: above this, torch uses more than one thread
INFINITY = {
    torch.float64: (np.int64, np.uint64, 0x7FF << 52),
    torch.float32: (np.int32, np.uint32, 0xFF << 23),
    torch.bfloat16: (np.int16, np.uint16, 0xFF << 7),
    torch.float16: (np.int16, np.uint16, 0x1F << 10),
    torch.float8_e5m2: (np.int8, np.uint8, 0x1F << 2),
    torch.float8_e4m3fn: (np.int8, np.uint8, 0x7F),  # it has no infinity, and one NaN
}
"""The bits of infinity, above which are only those of NaN; negative numbers have the highest bit besides."""


def pieces_of(tensor: Tensor, dtype: torch.dtype) -> Iterator[Bytes]:
    """Return a tensor's bytes in ``dtype``, in order and on the CPU, without a copy where possible."""
    if _lies_ready(tensor, dtype):
        raw = _bytes_of(tensor)
        for start in range(0, len(raw), PIECE_BYTES):
            yield raw[start : start + PIECE_BYTES]
        return
    flat = tensor.detach().reshape(-1)
    step = CAST_ELEMENTS if flat.is_cpu else PIECE_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        yield _bytes_of(flat[start : start + step].to(dtype).cpu())


def send(tensor: Tensor, dtype: torch.dtype, take: Callable[[Bytes], object], name: str | None = None) -> str:
    """Pass a tensor's bytes to ``take``, piece by piece, and return their digest."""
    if tensor.nbytes <= PIECE_BYTES and _lies_ready(tensor, dtype):  # the most, and all of it at once
        pieces: Iterable[Bytes] = (_bytes_of(tensor),)
    else:
        pieces = pieces_of(tensor, dtype)
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.data)
        if name is not None and not is_finite(piece, dtype):
            raise _not_finite(name, tensor, dtype)
        take(piece)
    return str(digest.hexdigest())


def _not_finite(name: str, tensor: Tensor, dtype: torch.dtype) -> WeightSyncError:
    values = tensor.detach().reshape(-1)
    bad = int((~values.to(dtype).double().isfinite()).sum())
    here = f" in {dtype}, in which they are sent" if bool(values.double().isfinite().all()) else ""
    return WeightSyncError(
        f"{bad} of the {len(values)} numbers of {name} are NaN or infinite{here}: these weights are not sent, and the "
        "engine keeps those that it has. Find the training step that made them, and go back to an earlier checkpoint"
    )


def is_finite(piece: Bytes, dtype: torch.dtype) -> bool:
    """Whether none of the numbers is NaN or infinite, given as bytes; other dtypes than floating ones have neither."""
    if dtype not in INFINITY or not len(piece):
        return True
    signed, unsigned, infinity = INFINITY[dtype]
    negative = infinity | 1 << (8 * dtype.itemsize - 1)
    return bool(piece.view(signed).max() < infinity and piece.view(unsigned).max() < negative)


def _lies_ready(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_cpu


def _bytes_of(tensor: Tensor) -> Bytes:
    raw: Bytes = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
    return raw


def lay_out(kinds: Iterable[TensorKind]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a flat file, and the file's size."""
    offsets, size = [], 0
    for dtype, shape in kinds:
        offsets.append(size)
        size += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, size


class MappedFile:
    """A file's tensors, mapped read-only: changes by its writer are visible here, and writing here kills the
    process.
    """

    def __init__(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise ManifestMismatch(f"{path.name} of the weight store cannot be opened: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            start = header_end(descriptor, path) if path.suffix == SAFETENSORS else 0
            self.identity = (status.st_dev, status.st_ino, status.st_size)
            self.path, self.size = path, max(status.st_size - start, 0)
            whole = mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ) if self.size else b"\0"
            self.view = memoryview(whole)[start if self.size else 0 :]
        finally:
            os.close(descriptor)
        address = np.frombuffer(self.view, np.uint8).ctypes.data
        # torch warns of read-only memory; this does not say that it is. The mapping lives as long as a tensor does.
        buffer: Any = (ctypes.c_uint8 * len(self.view)).from_address(address)
        buffer.owner = self.view
        self._buffer = buffer

    def is_current(self) -> bool:
        """Whether the path still names this file, at the same size."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return self.identity == (status.st_dev, status.st_ino, status.st_size)

    def check(self, entry: TensorEntry) -> None:
        """Refuse a tensor that lies past the end; reading there would kill the process."""
        if entry.end > self.size:
            raise ManifestMismatch(
                f"{self.path.name} has {self.size} bytes of tensors, {entry.name} ends at {entry.end}: the file was "
                "cut short"
            )

    def tensor(self, entry: TensorEntry) -> Tensor:
        """Return a tensor of the file, without a copy."""
        dtype, count = entry.torch_dtype, math.prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


class CheckedTensors(Mapping[str, Tensor]):
    """Tensors of a version, each compared with its digest on access; its bytes are in the cache afterwards."""

    def __init__(self, manifest: Manifest, files: Mapping[int | None, MappedFile]) -> None:
        self._version, self._files = manifest.version, files
        self._entries = {entry.name: entry for entry in manifest.entries}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        file = self._files[entry.base]
        check_digest(self._version, entry, file.view[entry.offset : entry.end])
        return file.tensor(entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def check_digest(version: int, entry: TensorEntry, content: Buffer) -> None:
    """Compare a tensor's bytes with those published."""
    if xxhash.xxh3_64_hexdigest(content) != entry.digest:
        raise not_published(version, entry)


def not_published(version: int, entry: TensorEntry) -> DigestMismatch:
    """Return the error for a tensor whose bytes differ from those published."""
    return DigestMismatch(f"version {version}: bytes of {entry.name} are not those published; publish it again")


def verify_entries(manifest: Manifest, view_of: Callable[[TensorEntry], memoryview], threads: int) -> None:
    """Hash every tensor's bytes and compare."""

    def verify(share: Sequence[TensorEntry]) -> None:
        for some in in_lines(share):
            for entry in some:
                check_digest(manifest.version, entry, view_of(entry)[entry.offset : entry.end])

    if threads <= 1:
        verify(manifest.entries)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="weight-reader") as pool:
        list(pool.map(verify, (manifest.entries[first::threads] for first in range(threads))))


# -- files of safetensors ---------------------------------------------------------------------------------------------


def header_end(descriptor: int, path: Path) -> int:
    """Return where the tensors of an open file begin."""
    end = LENGTH_BYTES + int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if end > min(os.fstat(descriptor).st_size, MOST_HEADER_BYTES) or end % ALIGNMENT:
        raise ManifestMismatch(f"the header of {path.name} is damaged: the file was cut short, or is not a store's")
    return end


def read_header(path: Path) -> Manifest:
    """Return the manifest that is the header of a file."""
    with path.open("rb") as file:
        end = header_end(file.fileno(), path)
        file.seek(LENGTH_BYTES)
        return Manifest.from_json(file.read(end - LENGTH_BYTES).rstrip(b" ").decode(errors="replace"))


def write_header(file: IO[bytes], manifest: Manifest, end: int) -> None:
    """Write a manifest as the header of a file that was left room for it, up to ``end``."""
    header = manifest.to_json().encode().ljust(end - LENGTH_BYTES)
    assert len(header) == end - LENGTH_BYTES, "the tensors begin inside of the header"
    file.seek(0)
    file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
