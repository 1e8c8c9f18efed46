"""Bytes: tensors cut into pieces that are hashed and copied while in cache, patches, and files mapped without a copy.

Hashing brings a piece into the cache, from where it is copied, so both cost no more than the copy alone. There it is
also looked through for numbers that are not finite: as integers, NaN and infinity are larger than all other numbers.
numpy copies, because torch's threads on a busy host cost a hundred times what they gain.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from torchrl_moe.errors import DigestMismatch, ManifestMismatch, WeightSyncError
from torchrl_moe.store.manifest import GAP_BYTES, Manifest, TensorEntry, TensorKind

Bytes = NDArray[np.uint8]
Buffer = bytes | memoryview
Identity = tuple[int, int, int]  # of a file: device, inode, bytes
PIECE_BYTES = 1 << 20
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
    if tensor.dtype == dtype and tensor.is_cpu:
        raw = _bytes_of(tensor)
        for start in range(0, len(raw), PIECE_BYTES):
            yield raw[start : start + PIECE_BYTES]
        return
    flat = tensor.detach().reshape(-1)
    step = CAST_ELEMENTS if flat.is_cpu else PIECE_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        yield _bytes_of(flat[start : start + step].to(dtype).cpu())


def send(
    tensor: Tensor, dtype: torch.dtype, take: Callable[[int, Bytes], object] | None = None, name: str | None = None
) -> str:
    """Pass a tensor's bytes to ``take``, piece by piece, each with its offset; return their digest."""
    digest, offset = xxhash.xxh3_64(), 0
    for piece in pieces_of(tensor, dtype):
        digest.update(piece.data)
        if name is not None:
            _check_finite(piece, name, tensor, dtype)
        if take is not None:
            take(offset, piece)
        offset += len(piece)
    return str(digest.hexdigest())


def _check_finite(piece: Bytes, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse a piece of a tensor with NaN or infinity in it; other dtypes than floating ones have neither."""
    if dtype not in INFINITY:
        return
    signed, unsigned, infinity = INFINITY[dtype]
    negative = infinity | 1 << (8 * dtype.itemsize - 1)
    if piece.view(signed).max() < infinity and piece.view(unsigned).max() < negative:
        return
    values = tensor.detach().reshape(-1)
    bad = int((~values.to(dtype).double().isfinite()).sum())
    here = f" in {dtype}, in which they are sent" if bool(values.double().isfinite().all()) else ""
    raise WeightSyncError(
        f"{bad} of the {len(values)} numbers of {name} are NaN or infinite{here}: these weights are not sent, and the "
        "engine keeps those that it has. Find the training step that made them, and go back to an earlier checkpoint"
    )


def _bytes_of(tensor: Tensor) -> Bytes:
    raw: Bytes = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
    return raw


def lay_out(kinds: Iterable[TensorKind]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a file, without gaps, as safetensors wants it, and the size of all.

    Those whose bytes are a multiple of the widest element come first, then of a narrower one: each is aligned.
    """
    sizes = [(shape.numel() * dtype.itemsize, dtype.itemsize) for dtype, shape in kinds]
    widest = max((width for _, width in sizes), default=1)
    offsets, size = [0] * len(sizes), 0
    for place in sorted(range(len(sizes)), key=lambda place: -math.gcd(sizes[place][0], widest)):
        offsets[place] = size
        size += sizes[place][0]
    return offsets, size


# -- patches ----------------------------------------------------------------------------------------------------------
#
# Between two steps of training about one in a hundred elements of a bfloat16 model changes. A patch holds their bits,
# and the distance of each from the one before (the first: from the start). A distance of more than 16 bits is bridged
# by elements that did not change, so that reading needs no other case: positions are a running sum.

FAR = 0xFFFF
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes


def distances(positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Return rising positions with those that bridge long distances, and the distance of each from the one before.

    >>> positions, gaps = distances(np.array([3, 70_000]))
    >>> positions.tolist(), gaps.tolist()
    ([3, 65538, 70000], [3, 65535, 4462])
    """
    gaps = np.diff(positions, prepend=0)
    bridges = np.maximum(gaps - 1, 0) // FAR
    if bridges.any():
        steps = np.full(int(bridges.sum()) + len(gaps), FAR, np.int64)
        steps[np.cumsum(bridges + 1) - 1] = gaps - FAR * bridges
        positions, gaps = np.cumsum(steps), steps
    return positions, gaps.astype(np.uint16)


def patch(into: Bytes, entry: TensorEntry, stored: Buffer) -> None:
    """Set the changed elements of a tensor's bytes ``into``, from what a patch's file holds of it."""
    width, count = entry.torch_dtype.itemsize, entry.changed or 0
    positions = np.cumsum(np.frombuffer(stored, np.uint16, count, count * width), dtype=np.int64)
    elements = into.view(UNSIGNED[width])
    if count and positions[-1] >= len(elements):
        raise ManifestMismatch(f"a patch of {entry.name} ends at element {positions[-1]} of {len(elements)}")
    elements[positions] = np.frombuffer(stored, UNSIGNED[width], count)


class Image:
    """The bytes of the version written last, to find what the next one changes. As large as the model."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[TensorKind, Bytes]] = {}

    def update(self, name: str, tensor: Tensor, kind: TensorKind) -> tuple[str, Bytes, int]:
        """Take a tensor in; return its digest, what a patch holds of it, and of how many elements that is.

        Where that would be no smaller, it is the whole tensor, a view of the image.
        """
        dtype, shape = kind
        width, count, is_known = dtype.itemsize, shape.numel(), self._of.get(name, (None,))[0] == kind
        if not is_known:
            self._of[name] = kind, np.empty(count * width, np.uint8)
        whole = self._of[name][1]
        own = whole.view(UNSIGNED[width])
        found: list[NDArray[np.int64]] = []
        room = count * width // (width + GAP_BYTES) if is_known else -1  # for elements in a patch that is smaller

        def take(offset: int, piece: Bytes) -> None:
            nonlocal room
            new, begin = piece.view(own.dtype), offset // width
            old = own[begin : begin + len(new)]
            if room < 0:
                old[...] = new
                return
            changed = np.flatnonzero(old != new)
            old[changed] = new[changed]
            found.append(changed + begin)
            room -= len(changed)

        digest = send(tensor, dtype, take, name)
        positions, gaps = distances(np.concatenate(found) if found else np.empty(0, np.int64))
        if room < 0 or len(gaps) * (width + GAP_BYTES) >= count * width > 0:  # the bridges filled it
            return digest, whole, count
        return digest, np.concatenate([own[positions].view(np.uint8), gaps.view(np.uint8)]), len(gaps)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, ((dtype, shape), content) in self._of.items():
            flat = torch.from_numpy(content).view(dtype) if len(content) else torch.empty(0, dtype=dtype)
            yield name, flat.view(shape)

    def keep(self, names: Iterable[str]) -> None:
        names = set(names)
        self._of = {name: held for name, held in self._of.items() if name in names}


# -- files ------------------------------------------------------------------------------------------------------------


def identity_of(path: Path) -> Identity | None:
    """Return a file's identity, or ``None`` if it is gone."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size


class MappedFile:
    """A file, mapped read-only: changes by its writer are visible here, and writing here kills the process.

    In memory a writer writes a version over an old one's file, which then has another header: so that is looked at each
    time, and the mapping stays.
    """

    _whole: memoryview
    _buffer: Any  # the same, for torch

    def __init__(self, path: Path, held: Mapping[Identity, MappedFile]) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ManifestMismatch(f"{path.name} of the weight store cannot be opened: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            self.path, self.identity = path, (status.st_dev, status.st_ino, status.st_size)
            self._start = header_end(descriptor, path)
            if self.identity in held:
                self._whole, self._buffer = held[self.identity]._whole, held[self.identity]._buffer
                return
            self._whole = memoryview(mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ))
        finally:
            os.close(descriptor)
        address = np.frombuffer(self._whole, np.uint8).ctypes.data
        # torch warns of read-only memory; this does not say that it is. The mapping lives as long as a tensor does.
        buffer = (ctypes.c_uint8 * len(self._whole)).from_address(address)
        buffer.owner = self._whole  # type: ignore[attr-defined]
        self._buffer = buffer

    @property
    def header(self) -> memoryview:
        return self._whole[LENGTH_BYTES : self._start]

    @property
    def tensors(self) -> memoryview:
        return self._whole[self._start :]

    def check(self, manifest: Manifest) -> None:
        """Refuse a file whose tensors lie past its end; reading there would kill the process."""
        size = len(self._whole) - self._start
        if manifest.extent > size:
            last = max(manifest.entries, key=lambda entry: entry.end)
            raise ManifestMismatch(
                f"{self.path.name} has {size} bytes of tensors, {last.name} ends at {last.end}: the file was cut short"
            )

    def stored(self, entry: TensorEntry) -> memoryview:
        return self._whole[self._start + entry.offset : self._start + entry.end]

    def tensor(self, entry: TensorEntry) -> Tensor:
        """Return a tensor that lies whole in the file, without a copy."""
        dtype, count = entry.torch_dtype, math.prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        place = self._start + entry.offset
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=place).view(entry.shape)


def check_digest(version: int, entry: TensorEntry, content: Buffer) -> None:
    """Compare a tensor's bytes with those published."""
    if xxhash.xxh3_64_hexdigest(content) != entry.digest:
        raise DigestMismatch(f"version {version}: bytes of {entry.name} are not those published; publish it again")


# -- files of safetensors ---------------------------------------------------------------------------------------------


def header_end(descriptor: int, path: Path) -> int:
    """Return where the tensors of an open file begin."""
    end = LENGTH_BYTES + int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if end > min(os.fstat(descriptor).st_size, MOST_HEADER_BYTES) or end % ALIGNMENT:
        raise ManifestMismatch(f"the header of {path.name} is damaged: the file was cut short, or is not a store's")
    return end


def manifest_of(header: Buffer) -> Manifest:
    return Manifest.from_json(bytes(header).rstrip(b" ").decode(errors="replace"))


def read_header(path: Path) -> Manifest:
    with path.open("rb") as file:
        end = header_end(file.fileno(), path)
        file.seek(LENGTH_BYTES)
        return manifest_of(file.read(end - LENGTH_BYTES))


def header_of(manifest: Manifest) -> bytes:
    """Return the head of a file: a manifest, padded so that the tensors after it are aligned."""
    text = manifest.to_json().encode()
    size = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES
    if size > MOST_HEADER_BYTES - LENGTH_BYTES:
        raise WeightSyncError(
            f"{len(manifest.entries)} tensors need a header of {size} bytes, and a file of safetensors may have "
            f"{MOST_HEADER_BYTES} at most"
        )
    return size.to_bytes(LENGTH_BYTES, "little") + text.ljust(size)
