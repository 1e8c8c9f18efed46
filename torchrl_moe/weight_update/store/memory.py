"""How much memory a process may still allocate before it is killed: the host's free memory, or a container's limit.

Workers that check at the same moment would all count the same free bytes. So each reserves what it is about to
allocate: by a file in a folder of the user's, with a lock that ends with its process.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

__all__ = ["MemoryReservation", "available_memory", "node_folder"]

LOCK = "lock"
NUMBERS = itertools.count()
MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
# of a control group's folder: its limit, its use, and what begins the names of its statistics
UNIFIED = ("memory.max", "memory.current", "")
LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def node_folder() -> Path:
    """Return the folder that all processes of a host see: in memory, where it has one."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")


class MemoryReservation:
    """Memory that this process is about to allocate; other workers of this user on this host do not count it as free.

    Keep it until the memory is allocated: then every worker sees that.

    Args:
        folder: of the reservations, which all workers see; by default in shared memory, or in ``/tmp`` (engine
            processes have temporary folders of their own). Where it cannot be used, each worker checks for itself.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or node_folder() / f"torchrl_moe-memory-{os.getuid()}"
        self._held: tuple[Path, int] | None = None

    def reserve(self, needed: int) -> str:
        """Reserve bytes, replacing an earlier reservation; return why that failed, or an empty string."""
        self.end()
        with self._alone() as shared:
            promised = sum(self._of_others()) if shared else 0
            free = available_memory() - promised
            if free < needed:
                others = f" besides {promised / 1e9:.1f} GB that others are about to take" if promised else ""
                return (
                    f"{needed / 1e9:.1f} GB are needed beside the model, {max(free, 0) / 1e9:.1f} GB are free{others}"
                )
            if shared:
                self._write(needed)
        return ""

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock on reservations; yield whether there is one."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            status = self._folder.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                raise PermissionError(f"{self._folder} is not this user's folder")
            lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield False
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield True
        finally:
            os.close(lock)

    def _of_others(self) -> Iterator[int]:
        """Yield what each living process has reserved, and remove the files of dead ones."""
        for path in self._folder.glob("*.bytes"):
            with suppress(FileNotFoundError), path.open() as file:  # one that ends now is gone
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield int(file.read())
                else:
                    path.unlink()

    def _write(self, needed: int) -> None:
        path = self._folder / f"{os.getpid()}-{next(NUMBERS)}.bytes"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, str(needed).encode())
        self._held = path, file

    def end(self) -> None:
        """Release the reservation. Idempotent."""
        if self._held is not None:
            (path, file), self._held = self._held, None
            path.unlink(missing_ok=True)
            os.close(file)


def available_memory(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int:
    """Return the bytes that this process may take: the least of what the host and its control groups leave.

    Control groups (Linux, versions 1 and 2) limit a container or a batch job. Pages of files, which the kernel can
    drop, count as free, as they do for the host.

    Args:
        membership: the kernel's file of the groups that this process is in.
        mount: where groups are found.
    """
    left = [_left(folder, names) for folder, names in _groups(membership, mount)]
    return int(min([psutil.virtual_memory().available, *(found for found in left if found is not None)]))


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


def _left(folder: Path, names: tuple[str, str, str]) -> int | None:
    limit, used, prefix = names
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        taken = int((folder / used).read_text())
        figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        files = sum(int(figures.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return max(int(most) - taken + files, 0)
    except (OSError, ValueError):  # the group is not mounted here, or has no limit or no use to read
        return None
