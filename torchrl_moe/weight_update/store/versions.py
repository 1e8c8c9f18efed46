"""The weight store of several hosts: one folder per version, in a directory on a file system that all of them mount.

A version is written under a temporary name, its manifest last, and renamed into place whole; then ``STABLE`` names it.
With ``delta`` only tensors that changed are written, and the manifest says which older version's file holds each of the
others. Old versions are collected, but none that a reader has leased, and no file that a manifest refers to.

A lease is a file that its reader removes; one that is older than :data:`LEASE_SECONDS` is a dead reader's. Times are
the file system's own. NFS may show a client an old state of a directory for as long as it caches attributes (seconds,
by ``acregmax`` and ``acdirmax``): keep one version more than is in use there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torch import Tensor

from torchrl_moe._errors import ManifestMismatch, WeightSyncError
from torchrl_moe.weight_update.store.flat import lay_out, send
from torchrl_moe.weight_update.store.manifest import ALIGNMENT, Manifest, TensorEntry, TensorKind
from torchrl_moe.weight_update.store.writing import (
    WriterLock,
    in_order,
    kinds_of,
    naming_full_disks,
    own_folder,
    replace_text,
)

__all__ = ["LEASE_SECONDS", "VersionsWriter", "leased", "newest_stable", "version_folder", "version_folders"]

LEASE_SECONDS = 900.0
DATA, MANIFEST, STABLE, LEASES = "weights", "manifest.json", "STABLE", "leases"


def version_folder(folder: Path, version: int) -> Path:
    """Return a version's folder."""
    return folder / f"v{version}"


def version_folders(folder: Path) -> dict[int, Path]:
    """Return version -> folder, those too that are kept for their bytes only."""
    paths = {path.name.removeprefix("v"): path for path in folder.glob("v*")}
    return {int(number): path for number, path in paths.items() if number.isdecimal()}


def newest_stable(folder: Path) -> int | None:
    """Return the newest whole version, as ``STABLE`` names it."""
    with contextlib.suppress(OSError):
        text = (folder / STABLE).read_text().strip().removeprefix("v")
        return int(text) if text.isdecimal() else None
    return None


@contextmanager
def leased(folder: Path, version: int) -> Iterator[None]:
    """Keep a version from being collected."""
    lease = folder / LEASES / f"v{version}-{uuid.uuid4().hex}"
    lease.parent.mkdir(mode=0o700, exist_ok=True)
    lease.touch(0o600)
    try:
        yield
    finally:
        lease.unlink(missing_ok=True)


class VersionsWriter:
    """Publishes versions.

    Args:
        folder: on a file system that trainer and engines share; made if it is not there, and closed to other users.
        keep_versions: how many of the newest to keep.
        delta: whether to write only what changed.
        fsync: whether a version must be on the disk before it is named: it then outlives a crash of the machine.

    Raises:
        WeightSyncError: the folder has a writer, or belongs to someone else.
    """

    def __init__(self, folder: str | Path, keep_versions: int = 2, *, delta: bool = False, fsync: bool = False) -> None:
        self.folder = own_folder(Path(folder))
        self._keep, self._delta, self._fsync = keep_versions, delta, fsync
        self._writing = WriterLock(self.folder)
        self._last: Manifest | None = None
        for left in (*self.folder.glob("v*.tmp-*"), *self.folder.glob("v*.gone")):  # of a writer that was killed
            shutil.rmtree(left)

    def publish(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        kinds: Mapping[str, TensorKind] | None = None,
    ) -> Manifest:
        """Write a version, make it visible by one rename, and collect old ones; arguments and errors as those of
        :meth:`~torchrl_moe.weight_update.store.slots.WeightStoreWriter.publish`. Readers are never waited for.
        """
        if kinds is None:
            named, kinds = kinds_of(tensors, version)
            tensors = named.items()
        _, size = lay_out(kinds.values())
        draft = self.folder / f"v{version}.tmp-{uuid.uuid4().hex[:8]}"
        draft.mkdir(mode=0o700)
        try:
            with naming_full_disks(self.folder, size):
                manifest = self._write(draft, tensors, version, kinds)
                replace_text(draft / MANIFEST, manifest.to_json(), self._fsync)
                self._show(draft, manifest)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._last = manifest
        self._collect()
        return manifest

    def _write(
        self, draft: Path, tensors: Iterable[tuple[str, Tensor]], version: int, kinds: Mapping[str, TensorKind]
    ) -> Manifest:
        before = self._base(version)
        entries: dict[str, TensorEntry] = {}
        descriptor = os.open(draft / DATA, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as data:
            for name, tensor in in_order(tensors, kinds):
                dtype, shape = kinds[name]
                kind = (str(dtype).removeprefix("torch."), tuple(shape))
                entries[name] = _unchanged(tensor, before.get(name), kind) or _append(data, name, tensor, kinds[name])
            if self._fsync:
                os.fsync(data.fileno())
        return Manifest(version, None, tuple(entries[name] for name in kinds))

    def _base(self, version: int) -> dict[str, TensorEntry]:
        """Return the tensors that need not be written again, each with the version whose file holds it."""
        last = self._last
        if not self._delta or last is None or last.version >= version:
            return {}
        return {e.name: e._replace(base=last.version if e.base is None else e.base) for e in last.entries}

    def _show(self, draft: Path, manifest: Manifest) -> None:
        place = version_folder(self.folder, manifest.version)
        if place.exists():  # of a trainer that counted as far before
            self._make_way(manifest.version, place)
        if self._fsync:
            _fsync_folder(draft)
        os.rename(draft, place)
        if self._fsync:
            _fsync_folder(self.folder)
        replace_text(self.folder / STABLE, f"v{manifest.version}\n", self._fsync)

    # -- collecting -------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        there = version_folders(self.folder)
        live = sorted(version for version, path in there.items() if (path / MANIFEST).exists())
        newest = self._last.version if self._last is not None else -1
        kept = set(sorted(live, key=lambda version: (version != newest, -version))[: self._keep])
        held = self._leased()
        kept |= {version for version in live if version not in kept and (version in held or not self._hide(version))}
        needed = {base for version in kept for base in self._bases(version)}
        for version in set(there) - kept - needed:
            shutil.rmtree(there[version])

    def _bases(self, version: int) -> set[int]:
        if self._last is not None and self._last.version == version:
            manifest = self._last
        else:
            try:
                manifest = Manifest.from_json((version_folder(self.folder, version) / MANIFEST).read_text())
            except ManifestMismatch:
                return set()
        return {entry.base for entry in manifest.entries if entry.base is not None}

    def _leased(self) -> set[int]:
        """Return the versions that readers hold, and forget leases of the dead."""
        clock = self.folder / ".clock"
        clock.touch(0o600)
        os.utime(clock)
        now, held = clock.stat().st_mtime, set()
        for lease in (self.folder / LEASES).glob("v*-*"):
            number = lease.name.removeprefix("v").partition("-")[0]
            with contextlib.suppress(FileNotFoundError):
                if now - lease.stat().st_mtime > LEASE_SECONDS:
                    lease.unlink()
                elif number.isdecimal():
                    held.add(int(number))
        return held

    def _hide(self, version: int) -> bool:
        """Hide a version from new readers, unless one leased it in the last moment."""
        shown = version_folder(self.folder, version) / MANIFEST
        hidden = shown.with_name("hidden")
        os.rename(shown, hidden)
        if version in self._leased():
            os.rename(hidden, shown)
            return False
        return True

    def _make_way(self, version: int, place: Path) -> None:
        """Remove a version whose number is used again, and those that need its bytes."""
        if version in self._leased():
            raise WeightSyncError(f"version {version} is there already, and a reader holds it: count on from it")
        for other, folder in version_folders(self.folder).items():
            if other == version or ((folder / MANIFEST).exists() and version in self._bases(other)):
                (folder / MANIFEST).unlink(missing_ok=True)
        gone = place.with_name(f"{place.name}.gone")
        os.rename(place, gone)
        shutil.rmtree(gone)

    def close(self) -> None:
        """Let go of the folder; what is published stays. Idempotent."""
        self._writing.close()


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unchanged(tensor: Tensor, before: TensorEntry | None, kind: tuple[str, tuple[int, ...]]) -> TensorEntry | None:
    if before is None or kind != (before.dtype, before.shape):
        return None
    return before if send(tensor, before.torch_dtype, len) == before.digest else None


def _append(data: IO[bytes], name: str, tensor: Tensor, kind: TensorKind) -> TensorEntry:
    offset = -(-data.tell() // ALIGNMENT) * ALIGNMENT
    data.seek(offset)

    def write(piece: object) -> None:
        left = memoryview(piece)  # type: ignore[arg-type]
        while left:
            left = left[data.write(left) :]

    digest = send(tensor, kind[0], write)
    return TensorEntry(name, str(kind[0]).removeprefix("torch."), tuple(kind[1]), offset, digest)
