"""The weight store of one host: a few slots in shared memory that stay allocated and mapped.

New files cost page allocation, so a version is written over the one that was published longest ago: version v over
version v - n in slot v % n, unless an older one was published again. Its manifest is renamed into place last. A reader
takes a shared lock on the slot while it reads, for which the writer's exclusive lock waits: a slot is never overwritten
under a reader, and its old manifest is removed before its first byte changes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import Tensor

from torchrl_moe.errors import ManifestMismatch, SyncTimeout
from torchrl_moe.weight_update.store.flat import Bytes, lay_out, send
from torchrl_moe.weight_update.store.manifest import Manifest, TensorEntry, TensorKind, dtype_name
from torchrl_moe.weight_update.store.writing import (
    WriterLock,
    check_higher,
    check_room,
    in_order,
    kinds_of,
    naming_full_disks,
    own_folder,
    read_manifest,
    replace_text,
)

__all__ = ["WeightStoreWriter", "lock_slot", "manifest_path", "manifest_paths", "slot_path", "unlock"]

LOCK_POLL_SECONDS = 0.005
BLOCK_BYTES = 512  # of ``st_blocks``
NOTHING: Bytes = np.empty(0, np.uint8)


def slot_path(folder: Path, slot: int) -> Path:
    """Return a slot's file."""
    return folder / f"slot-{slot}.weights"


def manifest_path(folder: Path, version: int) -> Path:
    """Return the file of a version's manifest."""
    return folder / f"manifest-{version}.json"


def manifest_paths(folder: Path) -> dict[int, Path]:
    """Return version -> file of its manifest."""
    paths = {path.stem.removeprefix("manifest-"): path for path in folder.glob("manifest-*.json")}
    return {int(number): path for number, path in paths.items() if number.isdecimal()}


def lock_slot(descriptor: int, kind: int, seconds: float) -> bool:
    """Wait for the lock of a slot's open file; return False on a timeout."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_POLL_SECONDS)


def unlock(descriptor: int) -> None:
    """Close a file and release its lock, even if a forked process still has the file open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class WeightStoreWriter:
    """Publishes versions.

    Args:
        folder: best in memory (``/dev/shm``); created if missing, and closed to other users.
        lock_seconds: how long to wait for readers of the slot that is next.
        slots: how many versions are kept at the same time.

    Attributes:
        protected: a version that is not overwritten; ``None`` for none.

    Raises:
        WeightSyncError: the folder has a writer, or belongs to another user.
    """

    def __init__(self, folder: str | Path, lock_seconds: float = 60.0, slots: int = 2) -> None:
        self.folder = own_folder(Path(folder))
        self._lock_seconds = lock_seconds
        self._slots = slots
        self.protected: int | None = None
        self._maps: dict[int, tuple[int, Bytes]] = {}  # slot -> inode, its bytes
        self._writing = WriterLock(self.folder)
        for draft in self.folder.glob(".manifest-*"):  # of a writer that was killed
            draft.unlink()
        paths = sorted(manifest_paths(self.folder).items(), key=lambda item: item[1].stat().st_mtime_ns)
        self._slot_of = {version: self._find_slot(path) for version, path in paths}  # the version shown last is last

    def _find_slot(self, path: Path) -> int | None:
        try:
            return read_manifest(path).slot
        except ManifestMismatch as error:
            warnings.warn(f"{path} is left out: {error}", stacklevel=4)
            return None

    def is_there(self) -> bool:
        """Whether its folder is still there, and still written by this process alone."""
        return self._writing.is_held()

    def publish(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        kinds: Mapping[str, TensorKind] | None = None,
    ) -> Manifest:
        """Write a version, and make it visible by one rename. Blocks while a reader holds its slot.

        Args:
            tensors: name and tensor; taken one at a time if ``kinds`` is given.
            version: its number.
            kinds: name -> (dtype, shape) of all that will come; tensors are cast to these dtypes.

        Raises:
            ManifestMismatch: a name comes twice, or tensors are not as announced.
            SyncTimeout: a reader did not release the slot in time.
            WeightSyncError: the folder, or the memory of this machine, has no room, or a number is NaN or infinite.
        """
        if kinds is None:
            named, kinds = kinds_of(tensors, version)
            tensors = named.items()
        slot = self._next_slot(version)
        names = {name: dtype_name(dtype) for name, (dtype, _) in kinds.items()}
        offsets, size = lay_out(kinds.values())
        with self._holding(slot) as descriptor:
            target = self._map(slot, descriptor, max(size, 1))
            self._withdraw(slot, version)
            places = dict(zip(kinds, offsets, strict=True))
            digests = {
                name: _write(name, tensor, kinds[name], target, places[name])
                for name, tensor in in_order(tensors, kinds)
            }
            entries = tuple(
                TensorEntry(name, names[name], tuple(shape), places[name], digests[name])
                for name, (_, shape) in kinds.items()
            )
            manifest = self._show(Manifest(version, slot, entries))
        self._remove_others()
        return manifest

    def _remove_others(self) -> None:
        """Remove the surplus slots of an earlier writer that kept more, once all of ours are newer."""
        used, own = list(self._slot_of.values())[::-1], set(range(self._slots))
        for slot in {other for other in used if other is not None} - own:
            if own <= set(used[: used.index(slot)]):
                self._withdraw(slot, -1)
                slot_path(self.folder, slot).unlink(missing_ok=True)

    def republish(self, old: int, new: int) -> Manifest:
        """Publish an older version's contents under a new number.

        Its bytes stay in the same slot, which becomes the last to be overwritten.

        Raises:
            ManifestMismatch: the older version is no longer in the store.
            ValueError: the new number is not higher.
            WeightSyncError: the folder has no room.
        """
        check_higher(old, new)
        path = manifest_path(self.folder, old)
        if self._slot_of.get(old) is None or not path.exists():
            raise ManifestMismatch(f"version {old} is not there, only {sorted(self._slot_of)}")
        manifest = read_manifest(path)
        return self._show(Manifest(new, manifest.slot, manifest.entries))

    def _next_slot(self, version: int) -> int:
        """Return the slot whose newest version was published longest ago; of empty ones that of the number."""
        used = list(self._slot_of.values())[::-1]
        kept = None if self.protected is None else self._slot_of.get(self.protected)
        free = [slot for slot in range(self._slots) if slot != kept]
        ages = {slot: used.index(slot) if slot in used else len(used) for slot in free}
        return min(ages, key=lambda slot: (-ages[slot], (slot - version) % self._slots))

    def _show(self, manifest: Manifest) -> Manifest:
        path = manifest_path(self.folder, manifest.version)
        with naming_full_disks(self.folder, manifest.extent):
            replace_text(path, manifest.to_json())
        self._slot_of.pop(manifest.version, None)  # the version shown last is last
        self._slot_of[manifest.version] = manifest.slot
        return manifest

    @contextmanager
    def _holding(self, slot: int) -> Iterator[int]:
        """Hold a slot's file exclusively."""
        path = slot_path(self.folder, slot)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if not lock_slot(descriptor, fcntl.LOCK_EX, self._lock_seconds):
                raise SyncTimeout(f"a reader has held {path.name} for {self._lock_seconds:g} s")
            yield descriptor
        finally:
            unlock(descriptor)

    def _map(self, slot: int, descriptor: int, size: int) -> Bytes:
        status = os.fstat(descriptor)
        inode, held = self._maps.get(slot, (0, NOTHING))
        if inode != status.st_ino or len(held) < size or status.st_size < len(held):
            check_room(self.folder, size - BLOCK_BYTES * status.st_blocks)
            with naming_full_disks(self.folder, size):
                os.posix_fallocate(descriptor, 0, size)
            with slot_path(self.folder, slot).open("r+b") as own:  # a mapping would hold its descriptor's lock
                held = np.frombuffer(mmap.mmap(own.fileno(), max(size, status.st_size)), np.uint8)
            self._maps[slot] = status.st_ino, held
        return held

    def _withdraw(self, slot: int, version: int) -> None:
        """Remove manifests whose bytes are about to be overwritten."""
        for old, used in list(self._slot_of.items()):
            if used in (slot, None) or old == version:
                manifest_path(self.folder, old).unlink(missing_ok=True)
                del self._slot_of[old]

    def close(self) -> None:
        """Close the folder; published versions stay. Idempotent."""
        self._maps.clear()
        self._writing.close()


def _write(name: str, tensor: Tensor, kind: TensorKind, target: Bytes, offset: int) -> str:
    position = offset

    def take(piece: Bytes) -> None:
        nonlocal position
        end = position + len(piece)
        # a copy by numpy's vector loop. The C library's memcpy copies 50 KB to 1.3 MB by a string instruction, which
        # takes 1.5 times as long over the small pages of shared memory.
        np.bitwise_or(piece, piece, out=target[position:end])
        position = end

    return send(tensor, kind[0], take, name)
