"""A store's folder: who owns it, who writes it, who reads from it, and what has room in it.

What a process made, that process removes: not one that was forked from it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from torchrl_moe.errors import TorchRLMoEError, WeightSyncError

# How much memory a process may still allocate before it is killed: the host's free memory, or a container's limit.


MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
# of a control group's folder: its limit, its use, and what begins the names of its statistics
UNIFIED = ("memory.max", "memory.current", "")
LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def available_memory(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int:
    """Return the bytes that this process may take: the least of what the host and its control groups leave.

    Control groups (Linux, versions 1 and 2) limit a container or a batch job. Pages of files, which the kernel can
    drop, count as free, as they do for the host.
    """
    least = int(psutil.virtual_memory().available)
    for folder, (limit, used, prefix) in _groups(membership, mount):
        # a group that is not mounted here, or has no limit ("max") or no use to read, limits nothing
        with suppress(OSError, ValueError):
            most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(figures.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            least = min(least, max(most - taken + files, 0))
    return least


def _groups(membership: Path, mount: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of this process's memory groups, and of those that contain them."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except (OSError, ValueError):  # not Linux, or a name in no encoding
        return
    for _, controllers, place in (line for line in lines if len(line) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (mount / "memory", LEGACY) if controllers else (mount, UNIFIED)
        folder = root / place.lstrip("/")
        while True:  # a container may see its own group as the root, under a name that it has outside
            yield folder, names
            if folder == root:
                break
            folder = folder.parent


def own_folder(folder: Path) -> Path:
    """Create a folder that only its owner may enter, and return it; an existing one must be a store, or empty."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise WeightSyncError(f"the weight store {str(folder)!r} belongs to another user: name a folder of your own")
    if not (folder / LOCK).exists() and any(folder.iterdir()):  # files like old versions are removed
        raise WeightSyncError(f"{str(folder)!r} holds other things: name a folder of the weight store's own")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


LOCK = "writer"


class WriterLock:
    """Keeps a second trainer out of a store, until it is closed or its process ends.

    On a file system without locks (some NFS mounts) this has no effect.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._process = folder / LOCK, os.getpid()
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._file = os.fdopen(descriptor, "r+", errors="replace")
        try:
            _lock(descriptor, fcntl.LOCK_EX)
        except BlockingIOError:
            owner = self._file.read(200) or "another process"
            self._file.close()
            raise WeightSyncError(
                f"the weight store {str(folder)!r} is written by {owner}: one trainer per folder. End that one, "
                "or name another folder."
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def is_held(self) -> bool:
        """Whether the folder is still this one, and this process is the one that locked it."""
        if self._file.closed or self._process != os.getpid():
            return False
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._file.fileno()))

    def close(self) -> None:
        """Let the next writer in. Idempotent; in a process that was forked from the writer it stays locked."""
        if not self._file.closed:
            if self._process == os.getpid():
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked process may still have the file open
            self._file.close()


def at_end(owner: object, function: Callable[..., object], *arguments: object) -> weakref.finalize[..., object]:
    """Return a finalizer of what this process made; a process that is forked from it calls it without effect."""
    process = os.getpid()

    def end() -> None:
        if process == os.getpid():
            function(*arguments)

    return weakref.finalize(owner, end)


# Pins: a reader pins a version while it reads, so that it is not removed.
#
# A pin is a file that its reader creates, locks and removes. A lock ends with its process, so a pin that nobody locks
# is a dead reader's. On a file system without locks, one that is older than PIN_SECONDS is.


PINS, UNLOCKED, PIN_SECONDS = "pins", "-unlocked", 900.0
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def pinned(folder: Path, version: int) -> Iterator[None]:
    """Pin a version: keep it from being removed."""
    pin = folder / PINS / f".{uuid.uuid4().hex}"
    pin.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(pin, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # locked before the writer sees it: one that it finds unlocked is a dead reader's
        is_locked = _lock(descriptor, fcntl.LOCK_SH)
        pin = pin.rename(pin.with_name(f"v{version}-{pin.name[1:]}{'' if is_locked else UNLOCKED}"))
        yield
    finally:
        pin.unlink(missing_ok=True)
        os.close(descriptor)


def pinned_versions(folder: Path) -> set[int]:
    """Return the versions that readers hold, and remove the pins of dead readers."""
    clock = folder / ".clock"  # times are the file system's own
    clock.touch(0o600)
    os.utime(clock)
    now, held = clock.stat().st_mtime, set()
    for pin in (folder / PINS).glob("v*-*"):
        number = pin.name.removeprefix("v").partition("-")[0]
        with suppress(FileNotFoundError):
            if _reader_is_gone(pin, now):
                pin.unlink()
            elif number.isdecimal():
                held.add(int(number))
    return held


def _reader_is_gone(pin: Path, now: float) -> bool:
    if pin.name.endswith(UNLOCKED):
        return now - pin.stat().st_mtime > PIN_SECONDS
    descriptor = os.open(pin, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return _lock(descriptor, fcntl.LOCK_EX)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Lock an open file, or return False where the file system has no locks; raises if another process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:  # another process's lock is one too
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


@contextmanager
def naming_full_disks(folder: Path, nbytes: int) -> Iterator[None]:
    """Turn the error of a full disk into a ``WeightSyncError``."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise _no_room(folder, nbytes, error.strerror) from None


def check_room(folder: Path, nbytes: int) -> None:
    """Refuse to write what does not fit: where a folder is in memory, the kernel would end processes to make room."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise _no_room(folder, nbytes, f"{free / 1e6:.0f} MB are free")
    if is_in_memory(folder) and nbytes > (free := available_memory()):
        raise _no_room(folder, nbytes, f"which is in memory, of which {free / 1e6:.0f} MB are free")


def is_in_memory(folder: Path) -> bool:
    """Whether a folder's files are in the host's memory."""
    here = folder.resolve()
    places = [(disk.mountpoint, disk.fstype) for disk in psutil.disk_partitions(all=True)]
    return max((place for place in places if here.is_relative_to(place[0])), default=("", ""))[1] in ("tmpfs", "ramfs")


def _no_room(folder: Path, nbytes: int, why: str | None) -> WeightSyncError:
    return WeightSyncError(
        f"no room for {nbytes / 1e6:.0f} MB in {folder} ({why}): a weight store keeps more than one version. Make "
        "room, or name a folder with more of it."
    )


@contextmanager
def naming_the_folder(folder: Path) -> Iterator[None]:
    """Turn an error of the operating system into a ``WeightSyncError`` that names the store."""
    try:
        yield
    except TorchRLMoEError:  # a timeout of ours is an OSError too
        raise
    except OSError as error:
        raise WeightSyncError(
            f"the weight store {str(folder)!r} cannot be used: {error}. Is everything in it this user's, a plain file, "
            "and writable? Remove what is not the store's, or name another folder"
        ) from error


def replace_text(path: Path, text: str, fsync: bool = False) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(text)
        if fsync:
            handle.flush()
            os.fsync(handle.fileno())
    os.replace(draft, path)
