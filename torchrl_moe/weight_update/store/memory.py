"""How much memory a process may still allocate before it is killed: the host's free memory, or a container's limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["available_memory"]

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
# of a control group's folder: its limit, its use, and what begins the names of its statistics
UNIFIED = ("memory.max", "memory.current", "")
LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


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
