"""Adapters in a weight store: one small folder per version, with peft's two files and a manifest of them.

A version is written under a temporary name and renamed into place whole. Its manifest has each file as a tensor of
bytes. A reader copies a version whole, so that the writer collects old ones without asking who still uses them.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import xxhash

from torchrl_moe._errors import DigestMismatch, WeightSyncError
from torchrl_moe.weight_update.store.manifest import Manifest, TensorEntry
from torchrl_moe.weight_update.store.writing import WriterLock, naming_full_disks, own_folder, replace_text

__all__ = ["ADAPTER_FILES", "AdapterWriter", "adapter_versions", "copy_adapter"]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MANIFEST, PREFIX = "manifest.json", "adapter-v"


class AdapterWriter:
    """Publishes versions of an adapter.

    Args:
        folder: of the store; made if it is not there, and closed to other users.
        keep_versions: how many of the newest to keep.

    Raises:
        WeightSyncError: the folder has a writer, or belongs to someone else.
    """

    def __init__(self, folder: str | Path, keep_versions: int = 2) -> None:
        self.folder = own_folder(Path(folder))
        self._keep = keep_versions
        self._writing = WriterLock(self.folder)
        for left in self.folder.glob(f"{PREFIX}*.tmp-*"):  # of a writer that was killed
            shutil.rmtree(left)

    def publish(self, files: Mapping[str, bytes], version: int) -> Manifest:
        """Write a version, make it visible by one rename, and collect old ones.

        Args:
            files: the bytes of each of :data:`ADAPTER_FILES`.
            version: its number.

        Raises:
            WeightSyncError: the folder has no room.
        """
        manifest = _manifest_of(files, version)
        draft = self.folder / f"{PREFIX}{version}.tmp-{uuid.uuid4().hex[:8]}"
        draft.mkdir(mode=0o700)
        try:
            with naming_full_disks(self.folder, manifest.nbytes):
                for name in ADAPTER_FILES:
                    (draft / name).write_bytes(files[name])
                replace_text(draft / MANIFEST, manifest.to_json())
            place = _version_folder(self.folder, version)
            if place.exists():  # of a trainer that counted as far before
                shutil.rmtree(place)
            os.rename(draft, place)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._collect(version)
        return manifest

    def _collect(self, newest: int) -> None:
        there = adapter_versions(self.folder)
        kept = sorted(there, key=lambda version: (version != newest, -version))[: self._keep]
        for version in there - set(kept):
            shutil.rmtree(_version_folder(self.folder, version))

    def close(self) -> None:
        """Let go of the folder; what is published stays. Idempotent."""
        self._writing.close()


def adapter_versions(folder: Path) -> set[int]:
    """Return the versions in a store; none if it is not there."""
    numbers = (path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*"))
    return {int(number) for number in numbers if number.isdecimal()}


def copy_adapter(folder: Path, version: int, into: Path) -> Manifest:
    """Copy a version's files into a folder, and return its manifest.

    Raises:
        WeightSyncError: the store has no such version.
        ManifestMismatch: its manifest cannot be read.
        DigestMismatch: its files are not those that were published.
    """
    place = _version_folder(folder, version)
    try:
        manifest = Manifest.from_json((place / MANIFEST).read_text())
        files = {name: (place / name).read_bytes() for name in ADAPTER_FILES}
    except FileNotFoundError as error:
        raise WeightSyncError(
            f"no adapter of version {version} in {str(folder)!r} ({error}): it was collected, or the store is not "
            "shared"
        ) from None
    if _manifest_of(files, version) != manifest:
        raise DigestMismatch(f"the files of adapter version {version} in {str(folder)!r} are not what was published")
    for name, content in files.items():
        (into / name).write_bytes(content)
    return manifest


def _version_folder(folder: Path, version: int) -> Path:
    return folder / f"{PREFIX}{version}"


def _manifest_of(files: Mapping[str, bytes], version: int) -> Manifest:
    entries = (
        TensorEntry(name, "uint8", (len(files[name]),), 0, xxhash.xxh3_64_hexdigest(files[name]))
        for name in ADAPTER_FILES
    )
    return Manifest(version, None, tuple(entries))
