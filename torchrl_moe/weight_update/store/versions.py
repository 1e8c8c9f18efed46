"""The weight store of several hosts: a file of safetensors per version, on a file system that all of them mount.

A file is written under a temporary name and renamed into place whole; then ``STABLE`` names it. With ``delta`` only
tensors that changed are written, and the header's ``__metadata__`` says which older version's file holds each of the
others. Old versions are removed, except those that a reader has pinned; a file that a newer version refers to stays,
under another name.

The header comes first, but its contents are known last: so room for the longest possible header is left, and padded
with spaces. Tensors follow each other without a gap, as safetensors requires, and each is aligned to its dtype. Those
whose size is a multiple of the widest element's are written at once, since whatever follows them is aligned. The
others, few where dtypes are mixed and none where they are not, wait in memory, or beyond 4 MB in a temporary file, and
come last: multiples of four bytes first, then of two, then the rest. safetensors sorts by dtype instead, for which all
tensors must be known before the first one is written.

A pin is a file that its reader creates and removes; one that is older than :data:`PIN_SECONDS` is a dead reader's.
Times are the file system's own. NFS may show a client an old state of a directory for as long as it caches attributes
(seconds, by ``acregmax`` and ``acdirmax``): keep one version more than is in use there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import xxhash
from torch import Tensor

from torchrl_moe.errors import ManifestMismatch, WeightSyncError
from torchrl_moe.weight_update.store.flat import (
    ALIGNMENT,
    LENGTH_BYTES,
    PIECE_BYTES,
    SAFETENSORS,
    header_end,
    lay_out,
    read_header,
    send,
    write_header,
)
from torchrl_moe.weight_update.store.manifest import Manifest, TensorEntry, TensorKind, dtype_name
from torchrl_moe.weight_update.store.writing import (
    WriterLock,
    check_higher,
    check_room,
    in_order,
    kinds_of,
    naming_full_disks,
    own_folder,
    replace_text,
)

__all__ = ["PIN_SECONDS", "VersionsWriter", "bytes_path", "newest_stable", "pinned", "version_path", "version_paths"]

PIN_SECONDS = 900.0
STABLE, PINS = "STABLE", "pins"
VERSION, BYTES = "v", "bytes-of-v"  # files of versions, and of older ones that newer ones refer to
WIDTHS = (8, 4, 2, 1)
MOST, NO_DIGEST = (1 << 63) - 1, "0" * 16
Identity = tuple[int, int, int]


def version_path(folder: Path, version: int) -> Path:
    """Return a version's file."""
    return folder / f"{VERSION}{version}{SAFETENSORS}"


def bytes_path(folder: Path, version: int) -> Path:
    """Return the file of a removed version whose bytes a newer one needs."""
    return folder / f"{BYTES}{version}{SAFETENSORS}"


def version_paths(folder: Path, prefix: str = VERSION) -> dict[int, Path]:
    """Return version -> file."""
    paths = {path.stem.removeprefix(prefix): path for path in folder.glob(f"{prefix}*{SAFETENSORS}")}
    return {int(number): path for number, path in paths.items() if number.isdecimal()}


def newest_stable(folder: Path) -> int | None:
    """Return the newest complete version, which ``STABLE`` names."""
    with contextlib.suppress(OSError):
        text = (folder / STABLE).read_text(encoding="utf-8", errors="replace").strip().removeprefix("v")
        return int(text) if text.isdecimal() else None
    return None


@contextmanager
def pinned(folder: Path, version: int) -> Iterator[None]:
    """Pin a version: keep it from being removed."""
    pin = folder / PINS / f"v{version}-{uuid.uuid4().hex}"
    pin.parent.mkdir(mode=0o700, exist_ok=True)
    pin.touch(0o600)
    try:
        yield
    finally:
        pin.unlink(missing_ok=True)


class VersionsWriter:
    """Publishes versions.

    Args:
        folder: on a file system that trainer and engines share; created if missing, and closed to other users.
        keep_versions: how many of the newest to keep.
        delta: whether to write only what changed.
        fsync: whether a version must be on the disk before it becomes visible: it then survives a crash of the machine.

    Attributes:
        protected: a version that is not removed; ``None`` for none.

    Raises:
        WeightSyncError: the folder has a writer, or belongs to another user.
    """

    def __init__(self, folder: str | Path, keep_versions: int = 2, *, delta: bool = False, fsync: bool = False) -> None:
        self.folder = own_folder(Path(folder))
        self._keep, self._delta, self._fsync = keep_versions, delta, fsync
        self._writing = WriterLock(self.folder)
        self.protected: int | None = None
        self._last: Manifest | None = None
        self._written: dict[int, Identity] = {}  # version -> its file, as it was written
        for left in self.folder.glob(f"{VERSION}*.tmp-*"):  # of a writer that was killed
            left.unlink()

    def publish(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        kinds: Mapping[str, TensorKind] | None = None,
    ) -> Manifest:
        """Write a version, make it visible by one rename, and remove old ones; arguments and errors as those of
        :meth:`~torchrl_moe.weight_update.store.slots.WeightStoreWriter.publish`. Readers are never waited for.
        """
        if kinds is None:
            named, kinds = kinds_of(tensors, version)
            tensors = named.items()
        before = self._base(version)
        _, size = lay_out(kinds.values())
        if not before:  # else it is known only later how much is written
            check_room(self.folder, size)
        with self._showing(version, size) as file, _Bases(self.folder, self._written) as bases:
            widest = max((dtype.itemsize for dtype, _ in kinds.values()), default=1)
            with contextlib.closing(_Body(file, _room(kinds, before, size), self.folder, widest)) as body:
                for name, tensor in in_order(tensors, kinds):
                    base = before.get(name)
                    if not (_is_unchanged(tensor, base, kinds[name]) and bases.have(base)):
                        body.add(name, tensor, kinds[name])
                entries = before | body.finish()
            manifest = Manifest(version, None, tuple(entries[name] for name in kinds))
            write_header(file, manifest, body.start)
        self._last = manifest
        self._collect()
        return manifest

    def republish(self, old: int, new: int) -> Manifest:
        """Publish an older version's contents under a new number. Its bytes stay where they are.

        Raises:
            ManifestMismatch: the older version is no longer in the store.
            ValueError: the new number is not higher.
            WeightSyncError: the folder has no room.
        """
        check_higher(old, new)
        try:
            entries = read_header(version_path(self.folder, old)).entries
        except FileNotFoundError:
            raise ManifestMismatch(f"version {old} is not there, only {sorted(version_paths(self.folder))}") from None
        manifest = Manifest(new, None, tuple(_based_on(old, entry) for entry in entries))
        with self._showing(new, 0) as file:
            write_header(file, manifest, _padded(manifest))
        self._last = manifest
        self._collect()
        return manifest

    def is_there(self) -> bool:
        """Whether its folder is still there, and still written by this process alone."""
        return self._writing.is_held()

    def doubt(self) -> None:
        """Read the bytes that the next version refers to, though their files look as they were written."""
        self._written.clear()

    def _base(self, version: int) -> dict[str, TensorEntry]:
        """Return the tensors that need not be written again, each with the version whose file holds it."""
        last = self._last
        if not self._delta or last is None or last.version >= version:
            return {}
        return {entry.name: _based_on(last.version, entry) for entry in last.entries}

    @contextmanager
    def _showing(self, version: int, size: int) -> Iterator[IO[bytes]]:
        """Yield a file under a temporary name; rename it once it is written."""
        draft = self.folder / f"{VERSION}{version}.tmp-{uuid.uuid4().hex[:8]}"
        try:
            with naming_full_disks(self.folder, size):
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    yield file
                    if self._fsync:
                        file.flush()
                        os.fsync(file.fileno())
                self._make_way(version)
                os.rename(draft, version_path(self.folder, version))
                if self._fsync:
                    _fsync_folder(self.folder)
                self._written[version] = _identity(os.stat(version_path(self.folder, version)))
                replace_text(self.folder / STABLE, f"v{version}\n", self._fsync)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    # -- removing old versions --------------------------------------------------------------------------------------

    def _collect(self) -> None:
        live = version_paths(self.folder)
        newest = self._last.version if self._last is not None else -1
        kept = set(sorted(live, key=lambda version: (version != newest, -version))[: self._keep])
        if self.protected in live:
            kept.add(self.protected)
        held = self._pinned()
        kept |= {version for version in live if version not in kept and (version in held or not self._hide(version))}
        needed = {base for version in kept for base in self._bases(version)}
        self._written = {version: file for version, file in self._written.items() if version in kept | needed}
        for version, path in version_paths(self.folder, BYTES).items():
            if version not in needed:
                path.unlink()

    def _bases(self, version: int) -> set[int]:
        """Return the versions whose bytes a version needs."""
        if self._last is not None and self._last.version == version:
            manifest = self._last
        else:
            try:
                manifest = read_header(version_path(self.folder, version))
            except ManifestMismatch:
                return set()
        return {entry.base for entry in manifest.entries if entry.base is not None}

    def _pinned(self) -> set[int]:
        """Return the versions that readers hold, and remove the pins of dead readers."""
        clock = self.folder / ".clock"
        clock.touch(0o600)
        os.utime(clock)
        now, held = clock.stat().st_mtime, set()
        for pin in (self.folder / PINS).glob("v*-*"):
            number = pin.name.removeprefix("v").partition("-")[0]
            with contextlib.suppress(FileNotFoundError):
                if now - pin.stat().st_mtime > PIN_SECONDS:
                    pin.unlink()
                elif number.isdecimal():
                    held.add(int(number))
        return held

    def _hide(self, version: int) -> bool:
        """Hide a version from new readers, unless one pinned it at the last moment."""
        shown, hidden = version_path(self.folder, version), bytes_path(self.folder, version)
        os.rename(shown, hidden)
        if version in self._pinned():
            os.rename(hidden, shown)
            return False
        return True

    def _make_way(self, version: int) -> None:
        """Remove a version whose number is used again, and those that need its bytes."""
        there = [
            path for path in (version_path(self.folder, version), bytes_path(self.folder, version)) if path.exists()
        ]
        if there and version in self._pinned():
            raise WeightSyncError(f"version {version} is there already, and a reader holds it: count on from it")
        if there:
            there += [path for other, path in version_paths(self.folder).items() if version in self._bases(other)]
        for path in there:
            path.unlink()

    def close(self) -> None:
        """Close the folder; published versions stay. Idempotent."""
        self._writing.close()


class _Bases(contextlib.ExitStack):
    """The files that a delta leaves tensors in; what is gone or damaged is not referred to again."""

    def __init__(self, folder: Path, written: Mapping[int, Identity]) -> None:
        super().__init__()
        self._folder, self._written = folder, written
        self._files: dict[int, tuple[int, int] | None] = {}  # base -> descriptor, and where its tensors begin
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def have(self, entry: TensorEntry | None) -> bool:
        """Whether a tensor's bytes are there as they were written; read, since a mapped file that shrinks kills."""
        assert entry is not None and entry.base is not None
        if entry.base not in self._files:
            self._files[entry.base] = self._open(entry.base)
        if (file := self._files[entry.base]) is None:
            return False
        descriptor, start = file
        if _identity(os.fstat(descriptor)) == self._written.get(entry.base):
            return True
        return self._digest(descriptor, start + entry.offset, entry.nbytes) == entry.digest

    def _open(self, base: int) -> tuple[int, int] | None:
        for path in (version_path(self._folder, base), bytes_path(self._folder, base)):
            with contextlib.suppress(OSError, ManifestMismatch):  # what cannot be read is as good as gone
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                self.callback(os.close, descriptor)
                return descriptor, header_end(descriptor, path)
        return None

    def _digest(self, file: int, offset: int, nbytes: int) -> str:
        """Return the digest of bytes of a file, as far as it has them."""
        digest, end = xxhash.xxh3_64(), offset + nbytes
        while offset < end and (count := os.preadv(file, [self._buffer[: end - offset]], offset)):
            digest.update(self._buffer[:count])
            offset += count
        return str(digest.hexdigest())


class _Body:
    """The tensors that are being written to a file."""

    def __init__(self, file: IO[bytes], start: int, folder: Path, widest: int) -> None:
        self._file, self.start, self._widest = file, start, widest
        self._waiting = {width: _waiting_file(folder) for width in WIDTHS if width < widest}
        self._sizes = dict.fromkeys(WIDTHS, 0)
        self._added: list[tuple[int, TensorEntry]] = []
        file.seek(start)

    def add(self, name: str, tensor: Tensor, kind: TensorKind) -> None:
        """Add a tensor, cast to ``kind``."""
        dtype, shape = kind
        width = math.gcd(shape.numel() * dtype.itemsize, self._widest)
        file: IO[bytes] = self._waiting.get(width, self._file)
        digest = send(tensor, dtype, lambda piece: file.write(piece.data), name)
        entry = TensorEntry(name, dtype_name(dtype), tuple(shape), self._sizes[width], digest)
        self._added.append((width, entry))
        self._sizes[width] += entry.nbytes

    def finish(self) -> dict[str, TensorEntry]:
        """Write the waiting tensors; return all, with their places."""
        starts = dict(zip(WIDTHS, itertools.accumulate(self._sizes.values(), initial=0), strict=False))
        for waiting in self._waiting.values():
            waiting.seek(0)
            shutil.copyfileobj(waiting, self._file, PIECE_BYTES)
        return {e.name: msgspec.structs.replace(e, offset=starts[width] + e.offset) for width, e in self._added}

    def close(self) -> None:
        """Drop the waiting tensors."""
        for waiting in self._waiting.values():
            waiting.close()


def _waiting_file(folder: Path) -> tempfile.SpooledTemporaryFile[bytes]:
    return tempfile.SpooledTemporaryFile(PIECE_BYTES, dir=str(folder))


def _room(kinds: Mapping[str, TensorKind], before: Mapping[str, TensorEntry], size: int) -> int:
    """Return the end of the longest header that a version may get: tensors may lie in its file, or in an older one."""
    rows = ((name, dtype_name(dtype), tuple(shape)) for name, (dtype, shape) in kinds.items())
    here = tuple(TensorEntry(name, dtype, shape, size, NO_DIGEST) for name, dtype, shape in rows)
    there = tuple(before.values())
    digits = len(str(len(kinds))) * len(there)  # of positions
    return _padded(Manifest(MOST, None, here)) + _padded(Manifest(MOST, None, there)) + _aligned(digits)


def _padded(manifest: Manifest) -> int:
    """Return where a manifest ends as a header."""
    return _aligned(LENGTH_BYTES + len(manifest.to_json().encode()))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _based_on(version: int, entry: TensorEntry) -> TensorEntry:
    return msgspec.structs.replace(entry, base=version if entry.base is None else entry.base)


def _is_unchanged(tensor: Tensor, before: TensorEntry | None, kind: TensorKind) -> bool:
    if before is None or (before.torch_dtype, before.shape) != (kind[0], tuple(kind[1])):
        return False
    return send(tensor, before.torch_dtype, len) == before.digest


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
