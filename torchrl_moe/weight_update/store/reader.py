"""The reader of a weight store, of either kind, in any process that sees its folder."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchrl_moe.errors import ManifestMismatch, SyncTimeout
from torchrl_moe.weight_update.store.flat import (
    SAFETENSORS,
    Bytes,
    CheckedTensors,
    MappedFile,
    read_header,
    verify_entries,
)
from torchrl_moe.weight_update.store.manifest import Manifest
from torchrl_moe.weight_update.store.slots import lock_slot, manifest_path, manifest_paths, slot_path, unlock
from torchrl_moe.weight_update.store.versions import bytes_path, newest_stable, pinned, version_path, version_paths
from torchrl_moe.weight_update.store.writing import read_manifest

__all__ = ["ADAPTER_FILES", "WeightStoreReader", "adapter_tensors", "copy_adapter"]


class WeightStoreReader:
    """Reads versions. Files stay mapped from one version to the next; safe to use from several threads.

    Args:
        folder: the writer's.
        lock_seconds: how long to wait for a writer of the slot to be read.
    """

    def __init__(self, folder: str | Path, lock_seconds: float = 60.0) -> None:
        self.folder = Path(folder)
        self._lock_seconds = lock_seconds
        self._mapped: dict[Path, MappedFile] = {}
        self._known: tuple[tuple[int, ...], Manifest] | None = None  # the manifest read last, and its file's identity
        self._lock = threading.Lock()

    def newest(self) -> int | None:
        """Return the newest version in the store, or ``None``."""
        return max(manifest_paths(self.folder), default=newest_stable(self.folder))

    def versions(self) -> list[int]:
        """Return the versions in the store, in ascending order."""
        return sorted({*manifest_paths(self.folder), *version_paths(self.folder)})

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a version.

        Raises:
            ManifestMismatch: it was not published, was removed, or its file is damaged.
        """
        for path in (manifest_path(self.folder, version), version_path(self.folder, version)):
            try:
                found = self._read(path)
            except FileNotFoundError:
                continue
            if found.version != version:
                raise ManifestMismatch(f"{path.name} is the manifest of version {found.version}, not {version}")
            return found
        raise ManifestMismatch(
            f"version {version} is not in the store, which holds {self.versions()}: it was collected, or "
            f"{str(self.folder)!r} is not shared"
        )

    def _read(self, path: Path) -> Manifest:
        status = path.stat()
        identity = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known
        if known is None or known[0] != identity:
            read = read_header(path) if path.suffix == SAFETENSORS else read_manifest(path)
            known = self._known = identity, read
        return known[1]

    def close(self) -> None:
        """Unmap what no tensor uses. Idempotent."""
        with self._lock:
            self._mapped.clear()

    @contextmanager
    def reading(self, manifest: Manifest, verify: bool = False) -> Iterator[Mapping[str, Tensor]]:
        """Keep a version from being overwritten or removed; yield its tensors.

        They are mapped, not copied. Do not keep them afterwards, and do not write into them: that kills the process.

        Args:
            manifest: the version.
            verify: whether to compare a tensor's digest on access, if :meth:`verify` was not called; its bytes are then
                in the cache for a copy.

        Raises:
            ManifestMismatch: the version is not there any more, or its files were cut short.
            SyncTimeout: the trainer did not release the slot in time; it may be suspended.
            DigestMismatch: on taking a tensor, its bytes are not those published.
        """
        with self._holding(manifest) as files:
            if verify:
                yield CheckedTensors(manifest, files)
            else:
                yield {entry.name: files[entry.base].tensor(entry) for entry in manifest.entries}

    @contextmanager
    def flat(self, manifest: Manifest) -> Iterator[Bytes]:
        """:meth:`reading` of a slot's raw bytes, to send them: uint8 ``[manifest.extent]``, read-only."""
        if manifest.slot is None:
            raise ManifestMismatch("a version in a directory may lie in more than one file: read it tensor by tensor")
        with self._holding(manifest) as files:
            yield np.frombuffer(files[None].view, np.uint8)[: manifest.extent]

    def verify(self, manifest: Manifest, threads: int = 1) -> None:
        """Compare every tensor's digest.

        Args:
            manifest: the version.
            threads: number of threads that read and hash; more help where reading waits for a disk or network.

        Raises:
            DigestMismatch: bytes differ from those published; the message names a tensor.
        """
        with self._holding(manifest) as files:
            views = {base: file.view for base, file in files.items()}
            verify_entries(manifest, lambda entry: views[entry.base], threads)

    @contextmanager
    def _holding(self, manifest: Manifest) -> Iterator[dict[int | None, MappedFile]]:
        with self._pin(manifest):
            if self.manifest(manifest.version) != manifest:  # now that it cannot be removed
                raise ManifestMismatch(f"version {manifest.version} was published again since its manifest was read")
            yield self._files(manifest)

    @contextmanager
    def _pin(self, manifest: Manifest) -> Iterator[None]:
        if manifest.slot is None:
            with pinned(self.folder, manifest.version):
                yield
            return
        path = slot_path(self.folder, manifest.slot)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise ManifestMismatch(f"{path.name} of the weight store is gone") from None
        try:
            if not lock_slot(descriptor, fcntl.LOCK_SH, self._lock_seconds):
                raise SyncTimeout(f"the trainer has held {path.name} for {self._lock_seconds:g} s")
            yield
        finally:
            unlock(descriptor)

    def _files(self, manifest: Manifest) -> dict[int | None, MappedFile]:
        """Return the files that hold a version, by the ``base`` of their entries."""
        files = {base: self._file(manifest, base) for base in (None, *manifest.last)}
        for base, entry in manifest.last.items():
            files[base].check(entry)
        with self._lock:  # versions are removed, and the mappings of their files with them
            self._mapped = {path: file for path, file in self._mapped.items() if file.is_current()}
        return files

    def _file(self, manifest: Manifest, base: int | None) -> MappedFile:
        if manifest.slot is not None:
            return self._map(slot_path(self.folder, manifest.slot))
        *places, last = self._places(manifest, base)
        for place in places:
            with suppress(ManifestMismatch):
                return self._map(place)
        return self._map(last)

    def _places(self, manifest: Manifest, base: int | None) -> tuple[Path, ...]:
        """Return the paths at which a file may be, in order."""
        if base is None:
            return (version_path(self.folder, manifest.version),)
        own = version_path(self.folder, base)
        return own, bytes_path(self.folder, base), own  # its writer may remove it and publish it again

    def _map(self, path: Path) -> MappedFile:
        with self._lock:
            held = self._mapped.get(path)
            if held is None or not held.is_current():
                self._mapped[path] = held = MappedFile(path)
            return held


# Adapters in a weight store: a directory of versions, each with peft's two files as tensors of bytes.


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def adapter_tensors(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Return what a version is published from: uint8, by file name.

    Args:
        files: the bytes of each of :data:`ADAPTER_FILES`.
    """
    return {name: torch.frombuffer(bytearray(files[name]), dtype=torch.uint8) for name in ADAPTER_FILES}


def copy_adapter(folder: Path, version: int, into: Path) -> Manifest:
    """Copy a version's files into a folder, and return its manifest.

    Raises:
        ManifestMismatch: the store has no such version, or its file is damaged, or is not one of an adapter.
        DigestMismatch: the bytes are not those that were published.
    """
    reader = WeightStoreReader(folder)
    manifest = reader.manifest(version)
    if set(manifest.tensors) != set(ADAPTER_FILES):
        raise ManifestMismatch(f"version {version} in {str(folder)!r} is not one of an adapter")
    with reader.reading(manifest, verify=True) as tensors:
        files = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    for name, content in files.items():
        (into / name).write_bytes(content)
    return manifest
