"""Copies of a shared file system's files in the memory of a node: one for all of its replicas.

The first process that needs a file copies it, compares its digests meanwhile, and renames it into place when it is
complete; the others find it by the shared file's identity: device, inode, time and size. All of this happens under one
lock, which ends with its holder; a process that is killed leaves a draft, which the next one removes. A process that
uses a copy holds a lock on it; a copy without a lock is removed by the next process that brings a version, or that
ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from torchrl_moe._errors import ManifestMismatch, WeightSyncError
from torchrl_moe.weight_update.store.flat import (
    PIECE_BYTES,
    SAFETENSORS,
    header_end,
    not_published,
    read_header,
)
from torchrl_moe.weight_update.store.manifest import Manifest, TensorEntry, in_lines
from torchrl_moe.weight_update.store.memory import MemoryReservation, node_folder
from torchrl_moe.weight_update.store.slots import lock_slot, unlock

__all__ = ["NodeCopies"]

LOCK, DRAFT = "lock", "draft"
STALL_SECONDS = 60.0  # without progress, after which a copying process is not waited for
CLOSE_SECONDS = 0.05  # for others that close; a worker that waits generates nothing


class NodeCopies:
    """The copies of one user on one node. One object for each reader; not safe to use from several threads.

    Args:
        folder: where they are, closed to other users; by default in shared memory, or in ``/tmp``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or node_folder() / f"torchrl_moe-copies-{os.getuid()}"
        self._held: dict[str, int] = {}  # name -> open file, with a lock

    def find(self, path: Path) -> Path:
        """Return a shared file's copy, or the file itself where there is none."""
        with suppress(OSError):
            copy = self.folder / _name_of(path.lstat())
            if self._is_closed() and copy.exists():
                return copy
        return path

    def bring(self, files: Mapping[Path, int], threads: int = 1) -> str:
        """Make sure that files have copies, and hold these; copies held before are released.

        Args:
            files: path -> descriptor, of files of safetensors.
            threads: that read and hash.

        Returns:
            Why some files were not copied and must be read from the shared file system. Empty if all have copies, or
            are in the memory of this node anyway.

        Raises:
            DigestMismatch: a tensor's bytes are not those published.
            ManifestMismatch: a file is damaged, or was cut short.
            WeightSyncError: a file cannot be read.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if not self._is_closed():
                raise PermissionError(errno.EPERM, f"{self.folder} is not a folder of this user's alone")
            far = {path: file for path, file in files.items() if not self._is_near(file)}
            with self._alone(STALL_SECONDS) as lock:
                names = {path: _name_of(os.fstat(file)) for path, file in far.items()}
                kept = {name: self._hold(name) for name in names.values() if (self.folder / name).exists()}
                self._release()
                self._held = kept
                self._sweep()
                for path, name in names.items():
                    if name not in kept:
                        self._copy(path, far[path], name, threads, lock)
                        kept[name] = self._hold(name)
        except OSError as error:
            return f"each replica of this node reads the shared file system by itself: {error.strerror or error}"
        return ""

    def close(self) -> None:
        """Release all copies, and remove those that no process holds. Idempotent."""
        self._release()
        with suppress(OSError):  # there is none, nor a folder
            if self._is_closed():
                lock = self._open_lock()
                try:
                    if lock_slot(lock, fcntl.LOCK_EX, CLOSE_SECONDS):  # else one is being made, and others go later
                        self._sweep()
                finally:
                    unlock(lock)

    def _is_closed(self) -> bool:
        """Whether the folder belongs to this user, and no other user may write to it."""
        status = self.folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077

    def _is_near(self, file: int) -> bool:
        return os.fstat(file).st_dev == self.folder.stat().st_dev

    def _open_lock(self) -> int:
        return os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    @contextmanager
    def _alone(self, patience: float) -> Iterator[int]:
        """Keep other processes of this node out; yield the file whose modification time shows them progress.

        Args:
            patience: seconds without such progress after which another process is not waited for.
        """
        lock = self._open_lock()
        try:
            seen = -1
            while not lock_slot(lock, fcntl.LOCK_EX, patience):
                before, seen = seen, os.fstat(lock).st_mtime_ns
                if seen == before:
                    raise TimeoutError(errno.ETIMEDOUT, f"another process copies, without progress for {patience:g} s")
            yield lock
        finally:
            unlock(lock)

    # -- all below: under the lock ----------------------------------------------------------------------------------

    def _hold(self, name: str) -> int:
        file = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file

    def _release(self) -> None:
        held, self._held = self._held, {}
        for file in held.values():
            unlock(file)

    def _sweep(self) -> None:
        """Remove copies that no living process holds."""
        for path in self.folder.glob(f"*{SAFETENSORS}"):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                continue
            finally:
                os.close(file)

    def _copy(self, path: Path, source: int, name: str, threads: int, lock: int) -> None:
        start, size = header_end(source, path), os.fstat(source).st_size
        draft, reservation = self.folder / DRAFT, MemoryReservation()
        draft.unlink(missing_ok=True)  # of a process that was killed
        try:
            if reason := reservation.reserve(size):
                raise OSError(errno.ENOMEM, reason)
            target = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                _allocate(target, size, self.folder)
                reservation.end()  # taken
                copier = _Copier(path, source, target, lock)
                copier.copy(0, start)
                copier.copy_tensors(read_header(draft), start, threads)
            finally:
                os.close(target)
            os.rename(draft, self.folder / name)
        finally:
            reservation.end()
            draft.unlink(missing_ok=True)


class _Copier:
    """One file that is being copied.

    Args:
        path: for messages.
        source: the file.
        target: its copy.
        lock: touched after each piece.
    """

    def __init__(self, path: Path, source: int, target: int, lock: int) -> None:
        self._path, self._source, self._target, self._lock = path, source, target, lock

    def copy_tensors(self, manifest: Manifest, start: int, threads: int) -> None:
        """Copy the tensors that lie in the file, and compare their digests.

        Args:
            manifest: the file's header.
            start: where its tensors begin.
            threads: number of threads that read and hash, each every n-th tensor.
        """
        here = sorted((entry for entry in manifest.entries if entry.base is None), key=lambda entry: entry.offset)

        def take(share: Sequence[TensorEntry]) -> None:
            for some in in_lines(share):
                for entry in some:
                    if self.copy(start + entry.offset, entry.nbytes) != entry.digest:
                        raise not_published(manifest.version, entry)

        if threads <= 1:
            take(here)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="weight-copier") as pool:
            list(pool.map(take, (here[first::threads] for first in range(threads))))

    def copy(self, offset: int, nbytes: int) -> str:
        """Copy bytes, and return their digest."""
        digest, end = xxhash.xxh3_64(), offset + nbytes
        buffer = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
        while offset < end:
            piece = buffer[: self._read(buffer[: end - offset], offset)]
            digest.update(piece)
            if os.pwrite(self._target, piece, offset) != len(piece):
                raise OSError(errno.ENOSPC, "no room for what was allocated")
            os.utime(self._lock)
            offset += len(piece)
        return str(digest.hexdigest())

    def _read(self, into: memoryview, offset: int) -> int:
        try:
            count = os.preadv(self._source, [into], offset)
        except OSError as error:  # mapped, it would end the process
            raise WeightSyncError(f"{self._path} cannot be read: {error.strerror}") from error
        if not count:
            raise ManifestMismatch(f"{self._path.name} ends at {offset} bytes: the file was cut short")
        return count


def _allocate(target: int, size: int, folder: Path) -> None:
    try:
        os.posix_fallocate(target, 0, size)
    except OSError as error:
        message = f"no room for {size / 1e6:.0f} MB in {folder.parent} ({error.strerror})"
        raise OSError(error.errno, message) from None


def _name_of(status: os.stat_result) -> str:
    """Return the name of a file's copy, which a file with other contents does not have."""
    identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    return "-".join(f"{number:x}" for number in identity) + SAFETENSORS
