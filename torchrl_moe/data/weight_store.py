"""The weight store: versions of a model's weights in two flat files on one host, and the manifests that describe them.

A trainer writes version v into slot v % 2, a file that stays allocated and mapped (new files cost page allocation),
then publishes a manifest by renaming it into place. A reader takes a shared lock on the slot while it reads, which the
writer's exclusive lock waits for: a slot is never overwritten under a reader, and its old manifest is gone before the
first byte is. Every tensor has a digest (xxh3), so a reader knows that what it maps is what was written.

Torch and numpy only: neither the trainer's model nor the engine's is known here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from torchrl_moe._errors import DigestMismatch, ManifestMismatch, SyncTimeout, WeightSyncError

__all__ = ["Manifest", "TensorEntry", "WeightStoreReader", "WeightStoreWriter", "check_tensors"]

TensorKind = tuple[torch.dtype, torch.Size]
SLOTS = 2
ALIGNMENT = 64
LOCK_POLL_SECONDS = 0.005
SHOWN_NAMES = 4


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: checkpoint name, dtype (torch's name), shape, place in the slot, and the xxh3 digest of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version: which slot holds it, and its tensors in the order of publication."""

    version: int
    slot: int
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def extent(self) -> int:
        """Bytes of the slot that its tensors reach into, gaps for alignment included."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    @property
    def digest(self) -> str:
        """One digest of all names, dtypes, shapes and bytes."""
        text = json.dumps([(e.name, e.dtype, e.shape, e.digest) for e in self.entries])
        return xxhash.xxh3_128_hexdigest(text.encode())

    @property
    def tensors(self) -> dict[str, TensorKind]:
        """Name -> (dtype, shape)."""
        return {entry.name: (entry.torch_dtype, torch.Size(entry.shape)) for entry in self.entries}

    def to_json(self) -> str:
        """Return the manifest's file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Undo :meth:`to_json`."""
        raw = json.loads(text)
        entries = (TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in raw["entries"])
        return cls(raw["version"], raw["slot"], tuple(entries))


def check_tensors(found: Mapping[str, TensorKind], expected: Mapping[str, TensorKind]) -> None:
    """Check that a version has exactly the tensors that a model expects.

    Args:
        found: name -> (dtype, shape) of what would be loaded.
        expected: the same of the model. Floating dtypes may differ, since loading casts; others may not.

    Raises:
        ManifestMismatch: names are missing or unknown, or shapes or kinds of dtype differ; some are named.
    """
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        parts = [
            f"{len(names)} {what} ({', '.join(names[:SHOWN_NAMES])}{', ...' if len(names) > SHOWN_NAMES else ''})"
            for what, names in (("missing", missing), ("unknown to the engine", unknown))
            if names
        ]
        raise ManifestMismatch(
            f"the weights are not the engine's tensors: {'; '.join(parts)}. Publish the whole model that the engine "
            "was started from, with checkpoint names."
        )
    for name, (dtype, shape) in expected.items():
        got_dtype, got_shape = found[name]
        if tuple(shape) != tuple(got_shape):
            raise ManifestMismatch(f"{name} has shape {list(got_shape)}, the engine expects {list(shape)}")
        if dtype != got_dtype and not (dtype.is_floating_point and got_dtype.is_floating_point):
            raise ManifestMismatch(f"{name} is {got_dtype}, the engine expects {dtype}")


def _slot_path(folder: Path, slot: int) -> Path:
    return folder / f"slot-{slot}.weights"


def _manifest_path(folder: Path, version: int) -> Path:
    return folder / f"manifest-{version}.json"


def _manifest_paths(folder: Path) -> list[Path]:
    return list(folder.glob("manifest-*.json"))


def _version_of(path: Path) -> int:
    return int(path.stem.removeprefix("manifest-"))


def _digest(raw: NDArray[np.uint8]) -> str:
    return xxhash.xxh3_64_hexdigest(raw.data)


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy()


class WeightStoreWriter:
    """Publishes versions.

    Args:
        folder: best in memory (``/dev/shm``); created if it is not there.
        lock_seconds: how long to wait for readers of the slot that is next.
    """

    def __init__(self, folder: str | Path, lock_seconds: float = 60.0) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_seconds = lock_seconds
        self._maps: dict[int, NDArray[np.uint8]] = {}

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Write a version, and make it visible by one rename. Blocks while a reader holds its slot.

        Raises:
            ManifestMismatch: a name comes twice.
            SyncTimeout: a reader did not let go of the slot in time.
            WeightSyncError: the folder has no room.
        """
        listed = list(tensors)
        if len({name for name, _ in listed}) != len(listed):
            raise ManifestMismatch(f"version {version} names a tensor twice")
        slot = version % SLOTS
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in listed]
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        path = _slot_path(self.folder, slot)
        with path.open("ab") as handle:
            self._lock(handle.fileno(), path)
            target = self._map(slot, path, max(starts[-1], 1))
            self._withdraw(slot)
            entries = []
            for (name, tensor), start, size in zip(listed, starts, sizes, strict=False):
                place = target[start : start + size]
                place[:] = _bytes_of(tensor)
                dtype = str(tensor.dtype).removeprefix("torch.")
                entries.append(TensorEntry(name, dtype, tuple(tensor.shape), start, size, _digest(place)))
            manifest = Manifest(version, slot, tuple(entries))
            self._show(manifest)
        return manifest

    def _lock(self, descriptor: int, path: Path) -> None:
        deadline = time.monotonic() + self._lock_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SyncTimeout(f"a reader has held {path.name} for {self._lock_seconds:g} s") from None
                time.sleep(LOCK_POLL_SECONDS)

    def _map(self, slot: int, path: Path, size: int) -> NDArray[np.uint8]:
        held = self._maps.get(slot)
        if held is None or len(held) < size:
            with path.open("r+b") as handle:
                try:
                    os.posix_fallocate(handle.fileno(), 0, size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    raise WeightSyncError(
                        f"no room for {size / 1e6:.0f} MB in {self.folder}: the weight store keeps two versions. Make "
                        "room, or name a folder with more of it."
                    ) from None
            self._maps[slot] = held = np.memmap(path, np.uint8, "r+", shape=(size,))
        return held

    def _withdraw(self, slot: int) -> None:
        for path in _manifest_paths(self.folder):
            if _version_of(path) % SLOTS == slot:
                path.unlink()

    def _show(self, manifest: Manifest) -> None:
        draft = self.folder / f".manifest-{manifest.version}.tmp"
        draft.write_text(manifest.to_json())
        os.replace(draft, _manifest_path(self.folder, manifest.version))


class WeightStoreReader:
    """Reads versions, in any process of the host.

    Args:
        folder: the writer's.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a version.

        Raises:
            ManifestMismatch: it was not published, or its slot was used again since.
        """
        path = _manifest_path(self.folder, version)
        try:
            return Manifest.from_json(path.read_text())
        except FileNotFoundError:
            there = sorted(map(_version_of, _manifest_paths(self.folder)))
            raise ManifestMismatch(f"version {version} is not in the store, which holds {there}") from None

    @contextmanager
    def reading(self, manifest: Manifest) -> Iterator[Mapping[str, Tensor]]:
        """Hold a version's slot and give its tensors, mapped and not copied; do not keep them afterwards."""
        with self._holding(manifest) as flat:
            yield {entry.name: _tensor(flat, entry) for entry in manifest.entries}

    @contextmanager
    def flat(self, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
        """:meth:`reading` for those who send a slot as it lies there: uint8 ``[manifest.extent]``."""
        with self._holding(manifest) as flat:
            yield flat[: manifest.extent]

    @contextmanager
    def _holding(self, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
        path = _slot_path(self.folder, manifest.slot)
        with path.open("rb") as handle:
            fcntl.flock(handle.fileno(), fcntl.LOCK_SH)
            if self.manifest(manifest.version) != manifest:  # now that the slot is held
                raise ManifestMismatch(f"version {manifest.version} was published again since its manifest was read")
            # copy-on-write: torch wants writable memory; nobody writes, so no page is copied
            yield np.memmap(path, np.uint8, "c")

    def verify(self, manifest: Manifest) -> None:
        """Compare every tensor's digest.

        Raises:
            DigestMismatch: bytes differ from those that were published; the first such tensor is named.
        """
        with self._holding(manifest) as flat:
            for entry in manifest.entries:
                if _digest(flat[entry.offset : entry.offset + entry.nbytes]) != entry.digest:
                    raise DigestMismatch(f"version {manifest.version}: bytes of {entry.name} are not those published")


def _tensor(flat: NDArray[np.uint8], entry: TensorEntry) -> Tensor:
    raw = torch.from_numpy(flat[entry.offset : entry.offset + entry.nbytes])
    return raw.view(entry.torch_dtype).view(entry.shape)
