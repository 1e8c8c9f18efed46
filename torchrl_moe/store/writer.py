"""The writer of a weight store: a file of safetensors for each version, in memory or on a file system that hosts share.

A file is written under a temporary name and renamed into place whole; then ``STABLE`` names it. Old versions are
removed, except those that a reader has pinned; a file that a newer version is a patch of stays, under another name. In
memory, a new file costs its pages: there the oldest version's file is written over, so that version goes before the new
one is written.

With ``delta`` a version is a patch of the one before, where that is smaller: the elements that changed, see
:class:`~torchrl_moe.store.content.Image`. Chains of patches are ended by a whole version before they cost a late reader
more than that.

NFS may show a client an old state of a directory for as long as it caches attributes (seconds, by ``acregmax`` and
``acdirmax``): keep one version more than is in use there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torchrl_moe.errors import ManifestMismatch, WeightSyncError
from torchrl_moe.store.content import SAFETENSORS, Bytes, Identity, Image, header_of, lay_out, read_header, send
from torchrl_moe.store.folder import (
    WriterLock,
    check_room,
    is_in_memory,
    naming_full_disks,
    own_folder,
    pinned_versions,
    replace_text,
)
from torchrl_moe.store.manifest import Manifest, TensorEntry, TensorKind, dtype_name

STABLE = "STABLE"
VERSION, BYTES = "v", "bytes-of-v"  # files of versions, and of older ones that newer ones are patches of
DRAFT = ".tmp-"  # in names of files that are being written
NO_DIGEST = "0" * 16
WIDEST = 8  # bytes of an element
LONGEST_CHAIN = 32  # patches after a whole version
BLOCK_BYTES = 512  # of ``st_blocks``
Write = Callable[[int, Bytes], object]


def version_path(folder: Path, version: int) -> Path:
    return folder / f"{VERSION}{version}{SAFETENSORS}"


def bytes_path(folder: Path, version: int) -> Path:
    """Return the file of a removed version whose bytes a newer one needs."""
    return folder / f"{BYTES}{version}{SAFETENSORS}"


def version_paths(folder: Path, prefix: str = VERSION) -> dict[int, Path]:
    paths = {path.stem.removeprefix(prefix): path for path in folder.glob(f"{prefix}*{SAFETENSORS}")}
    return {int(number): path for number, path in paths.items() if number.isdecimal()}


def newest_stable(folder: Path) -> int | None:
    """Return the newest complete version, which ``STABLE`` names."""
    with contextlib.suppress(OSError):
        text = (folder / STABLE).read_text(encoding="utf-8", errors="replace").strip().removeprefix("v")
        return int(text) if text.isdecimal() and len(text) < 20 else None
    return None


class _Link(NamedTuple):
    """A version, what it is a patch of, and how many bytes its file has."""

    version: int
    base: int | None
    extent: int


class WeightStoreWriter:
    """Publishes versions.

    Args:
        folder: in memory (``/dev/shm``), or on a file system that trainer and engines share; created if missing, and
            closed to other users.
        keep_versions: how many of the newest to keep.
        delta: whether to write only the elements that changed, where that is less. Costs as much of the trainer's
            memory as the model has bytes.
        fsync: whether a version must be on the disk before it becomes visible: it then survives a crash of the machine.

    Attributes:
        protected: a version that is not removed; ``None`` for none.

    Raises:
        WeightSyncError: the folder has a writer, belongs to another user, or holds other things.
    """

    def __init__(self, folder: str | Path, keep_versions: int = 2, *, delta: bool = False, fsync: bool = False) -> None:
        self.folder = own_folder(Path(folder))
        self._keep, self._delta, self._fsync = keep_versions, delta, fsync
        self._writing = WriterLock(self.folder)
        self.protected: int | None = None
        self._in_memory = is_in_memory(self.folder)
        self._last: Manifest | None = None
        self._image: Image | None = None  # of the last version; ``None``: not known
        self._written: dict[int, Identity] = {}  # version -> its file, as it was written
        self._links: dict[int, _Link] = {}  # of the same versions
        self._spare: Path | None = None  # in memory: the file of a removed version, to be written over
        self._mapped: dict[int, Bytes] = {}  # inode -> a file's bytes, in memory
        for left in self.folder.glob(f"{VERSION}*{DRAFT}*"):  # of a writer that was killed
            left.unlink()

    def is_there(self) -> bool:
        """Whether its folder is still there, and still written by this process alone."""
        return self._writing.is_held()

    def doubt(self) -> None:
        """Make the next version a whole one: a reader could not read what it would be a patch of."""
        self._image = None

    def close(self) -> None:
        """Close the folder; published versions stay. Idempotent."""
        self._image = None
        self._mapped.clear()
        self._writing.close()

    # -- writing ----------------------------------------------------------------------------------------------------

    def publish(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        kinds: Mapping[str, TensorKind] | None = None,
    ) -> Manifest:
        """Write a version, make it visible by one rename, and remove old ones. Readers are never waited for.

        Args:
            tensors: name and tensor; taken one at a time if ``kinds`` is given.
            version: its number.
            kinds: name -> (dtype, shape) of all that will come; tensors are cast to these dtypes.

        Raises:
            ManifestMismatch: a name comes twice, or tensors are not as announced.
            WeightSyncError: the folder, or the memory of this machine, has no room, or a number is NaN or infinite.
        """
        if kinds is None:
            listed = list(tensors)
            if len(dict(listed)) != len(listed):
                raise ManifestMismatch(f"version {version} names a tensor twice")
            tensors, kinds = listed, {name: (tensor.dtype, tensor.shape) for name, tensor in listed}
        self._check_held()
        if self._in_memory:
            self._remove_old(self._keep - 1, reuse=True)
        stream = _in_order(tensors, kinds)
        self._last = (self._publish_changes if self._delta else self._publish_whole)(stream, version, kinds)
        self._remove_old(self._keep)
        return self._last

    def republish(self, old: int, new: int) -> Manifest:
        """Publish an older version's contents under a new number. Its bytes stay where they are.

        Raises:
            ManifestMismatch: the older version is no longer in the store.
            ValueError: the new number is not higher.
            WeightSyncError: the folder has no room.
        """
        self._check_held()
        try:
            found = read_header(version_path(self.folder, old))
        except FileNotFoundError:
            raise ManifestMismatch(f"version {old} is not there, only {sorted(version_paths(self.folder))}") from None
        if new <= old:
            raise ValueError(f"version {old} can be published again only under a higher number, got {new}")
        # a patch that changes nothing, of one that holds something: it does not matter how often it is published again
        base = old if found.base is None or found.extent else found.base
        nothing = (TensorEntry(e.name, e.dtype, e.shape, 0, e.digest, 0) for e in found.entries)
        manifest = Manifest(new, base, tuple(nothing))
        with self._open(new, 0, len(header_of(manifest))) as (_, finish):
            finish(manifest)
        self._image, self._last = None, manifest
        self._remove_old(self._keep)
        return manifest

    def _check_held(self) -> None:
        if not self.is_there():
            raise WeightSyncError(
                f"this writer of {str(self.folder)!r} was closed, its folder was removed, or this process was forked "
                "from its own: make another one"
            )

    def _publish_whole(
        self, stream: Iterable[tuple[str, Tensor]], version: int, kinds: Mapping[str, TensorKind]
    ) -> Manifest:
        """Write a version with all of its elements."""
        offsets, size = lay_out(kinds.values())
        places = dict(zip(kinds, offsets, strict=True))

        def manifest_of(digests: Mapping[str, str]) -> Manifest:
            listed = ((name, dtype_name(dtype), tuple(shape)) for name, (dtype, shape) in kinds.items())
            entries = (TensorEntry(*kind, places[kind[0]], digests.get(kind[0], NO_DIGEST)) for kind in listed)
            return Manifest(version, None, tuple(entries))

        # digests come last, but their length is known: so is the header's
        with self._open(version, size, len(header_of(manifest_of({})))) as (write, finish):
            digests = {}
            for name, tensor in stream:
                at = partial(_write_after, write, places[name])
                digests[name] = send(tensor, kinds[name][0], at, name)
            return finish(manifest_of(digests))

    def _publish_changes(
        self, stream: Iterable[tuple[str, Tensor]], version: int, kinds: Mapping[str, TensorKind]
    ) -> Manifest:
        """Write what differs from the last version, or a whole one if that is hardly more."""
        image, self._image = self._image, None  # until the version is written
        last = self._last
        # a patch needs the last version as it was written: in the image, and in its files
        if image is None or last is None or last.version >= version or not self._is_as_written(last.version):
            image, last = Image(), None
        stored: dict[str, Bytes] = {}
        entries: dict[str, TensorEntry] = {}
        offset = 0
        for name, tensor in stream:
            digest, stored[name], count = image.update(name, tensor, kinds[name])
            dtype, shape = kinds[name]
            entries[name] = TensorEntry(name, dtype_name(dtype), tuple(shape), offset, digest, count)
            # the next tensor's elements are aligned
            offset += -(-len(stored[name]) // WIDEST) * WIDEST
        image.keep(kinds)
        manifest = Manifest(version, None if last is None else last.version, tuple(entries[name] for name in kinds))
        if last is not None and self._is_worth_it(manifest, last.version):
            with self._open(version, manifest.extent, len(header_of(manifest))) as (write, finish):
                for name, content in stored.items():
                    write(entries[name].offset, content)
                finish(manifest)
        else:
            manifest = self._publish_whole(image.tensors(), version, kinds)
        self._image = image
        return manifest

    def _is_worth_it(self, patch: Manifest, base: int) -> bool:
        """Whether a patch is better than a whole version: for this one's bytes, and for a late reader's."""
        patches = [patch.extent, *(link.extent for link in self._chain_of(base) if link.base is not None)]
        return 2 * patch.extent <= patch.nbytes and sum(patches) <= patch.nbytes and len(patches) <= LONGEST_CHAIN

    def _is_as_written(self, version: int) -> bool:
        """Whether all files that a version is made of are as they were written."""
        chain = self._chain_of(version)
        return bool(chain) and chain[-1].base is None and all(self._is_written(link.version) for link in chain)

    def _is_written(self, version: int) -> bool:
        for path in _paths(self.folder, version):
            with contextlib.suppress(OSError):
                return _identity(path) == self._written.get(version)
        return False

    @contextmanager
    def _open(self, version: int, size: int, start: int) -> Iterator[tuple[Write, Callable[[Manifest], Manifest]]]:
        """Yield what writes bytes at an offset after the header, and what writes the header and shows the version."""
        draft = self.folder / f"{VERSION}{version}{DRAFT}{uuid.uuid4().hex[:8]}"
        try:
            with naming_full_disks(self.folder, size), self._writer_of(draft, start + size) as write:

                def finish(manifest: Manifest) -> Manifest:
                    header = header_of(manifest)
                    assert len(header) == start, "the tensors do not begin where the header ends"
                    write(0, np.frombuffer(header, np.uint8))
                    if self._fsync:
                        _fsync(draft)
                    self._make_way(version)
                    path = draft.rename(version_path(self.folder, version))
                    if self._fsync:
                        _fsync(self.folder)
                    self._written[version] = _identity(path)
                    replace_text(self.folder / STABLE, f"v{version}\n", self._fsync)
                    self._links[version] = _Link(version, manifest.base, manifest.extent)
                    return manifest

                yield partial(_write_after, write, start), finish
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    @contextmanager
    def _writer_of(self, draft: Path, size: int) -> Iterator[Write]:
        """Open a file, in memory the spare one if it is there, and yield what writes into it."""
        if self._spare is not None:
            self._spare.rename(draft)
            self._spare = None
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            status = os.fstat(descriptor)
            # a spare file has its pages already
            check_room(self.folder, size - BLOCK_BYTES * status.st_blocks)
            os.ftruncate(descriptor, size)
            if not self._in_memory:
                yield partial(_write_at, descriptor)
                return
            os.posix_fallocate(descriptor, 0, size)
            held = self._mapped.get(status.st_ino)
            if held is None or len(held) != size:  # else its pages are mapped already
                held = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
            self._mapped[status.st_ino] = into = held
            # a copy by numpy's vector loop. The C library's memcpy copies 50 KB to 1.3 MB by a string instruction,
            # which takes 1.5 times as long over the small pages of shared memory.
            yield lambda offset, piece: np.bitwise_or(piece, piece, out=into[offset : offset + len(piece)])
        finally:
            os.close(descriptor)

    # -- removing old versions --------------------------------------------------------------------------------------

    def _remove_old(self, keep: int, reuse: bool = False) -> None:
        """Remove all but the last few versions; ``reuse``: leave the file of one to be written over."""
        live = version_paths(self.folder)
        # this writer's last version stays, even if an earlier writer's has a higher number
        newest = self._last.version if self._last is not None else -1
        kept = set(sorted(live, key=lambda version: (version != newest, -version))[:keep])
        if self.protected in live:
            kept.add(self.protected)
        held = pinned_versions(self.folder)
        kept |= {version for version in live if version not in kept and (version in held or not self._hide(version))}
        needed = held | {one.version for version in kept | held for one in self._chain_of(version)}
        self._written = {version: file for version, file in self._written.items() if version in needed}
        self._links = {version: link for version, link in self._links.items() if version in needed}
        for version, path in version_paths(self.folder, BYTES).items():
            if version not in needed and reuse and self._spare is None:
                self._spare = path.rename(self.folder / f"{VERSION}{version}{DRAFT}spare")
            elif version not in needed:
                path.unlink()
        inodes = {path.stat().st_ino for path in self.folder.glob(f"*{VERSION}*") if path.is_file()}
        self._mapped = {inode: held for inode, held in self._mapped.items() if inode in inodes}

    def _chain_of(self, version: int) -> list[_Link]:
        """Return the versions that a version is made of, as far as their files can be read."""
        chain: list[_Link] = []
        base: int | None = version
        while base is not None:
            link = self._links.get(base) or self._link_of(base)
            if link is None:
                break
            chain.append(link)
            base = link.base
        return chain

    def _link_of(self, version: int) -> _Link | None:
        """Read which version an earlier writer's is a patch of; what cannot be read is as good as gone."""
        for path in _paths(self.folder, version):
            with contextlib.suppress(OSError, ManifestMismatch):
                found = read_header(path)
                return _Link(version, found.base, found.extent)
        return None

    def _hide(self, version: int) -> bool:
        """Hide a version from new readers, unless one pinned it at the last moment."""
        shown, hidden = _paths(self.folder, version)
        is_free = False
        os.rename(shown, hidden)
        try:
            is_free = version not in pinned_versions(self.folder)
        finally:
            if not is_free:
                os.rename(hidden, shown)
        return is_free

    def _make_way(self, version: int) -> None:
        """Remove a version whose number is used again, and those that need its bytes."""
        there = [path for path in _paths(self.folder, version) if path.exists()]
        if there and version in pinned_versions(self.folder):
            raise WeightSyncError(f"version {version} is there already, and a reader holds it: count on from it")
        if there:
            for other, path in version_paths(self.folder).items():
                if other != version and version in (one.base for one in self._chain_of(other)):
                    there.append(path)
        for path in there:
            path.unlink()


def _paths(folder: Path, version: int) -> tuple[Path, Path]:
    """Return where a version's file is, if it is shown, and if it is hidden."""
    return version_path(folder, version), bytes_path(folder, version)


def _in_order(tensors: Iterable[tuple[str, Tensor]], kinds: Mapping[str, TensorKind]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as they come; check that each comes once and as announced."""
    waiting = set(kinds)
    for name, tensor in tensors:
        if name not in waiting:
            raise ManifestMismatch(f"{name} came {'twice' if name in kinds else 'unannounced'}")
        if tensor.shape != kinds[name][1]:
            raise ManifestMismatch(f"{name} came with shape {list(tensor.shape)}, announced {list(kinds[name][1])}")
        waiting.remove(name)
        yield name, tensor
    if waiting:
        raise ManifestMismatch(f"{len(waiting)} tensors did not come: {', '.join(sorted(waiting)[:4])}, ...")


def _write_after(write: Write, start: int, offset: int, piece: Bytes) -> None:
    write(start + offset, piece)


def _write_at(descriptor: int, offset: int, piece: Bytes) -> None:
    left = piece.data
    while len(left):
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def _identity(path: Path) -> Identity:
    status = os.stat(path, follow_symlinks=False)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
