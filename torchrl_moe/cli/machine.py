"""What the machine has: cores, memory, disk, shared memory, GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GB", "Machine", "Place"]

GB = 1e9
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder, what it is for, and bytes: free ones and all."""

    path: str
    use: str
    free: int
    total: int

    @classmethod
    def of(cls, path: str, use: str) -> Place | None:
        """Look at a folder; ``None`` if it is not there."""
        if not Path(path).is_dir():
            return None
        usage = shutil.disk_usage(path)
        return cls(path, use, usage.free, usage.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine.

    Attributes:
        system: name and processor.
        python: version.
        cores: that this process may use.
        memory: bytes in all, and bytes that are free for new processes.
        free_memory: see ``memory``.
        places: folders that runs write to.
        gpus: names and bytes; empty on a machine without CUDA.
        cuda: torch's CUDA version; ``None``: a build for CPUs, or no torch.
    """

    system: str
    python: str
    cores: int
    memory: int
    free_memory: int
    places: tuple[Place, ...]
    gpus: tuple[tuple[str, int], ...]
    cuda: str | None

    @classmethod
    def look(cls) -> Machine:
        """Look at this machine; loads torch, if it is there."""
        import psutil

        memory = psutil.virtual_memory()
        gpus, cuda = _gpus()
        places = (
            Place.of(os.getcwd(), "runs and checkpoints"),
            Place.of(tempfile.gettempdir(), "logs of engines"),
            Place.of(SHARED_MEMORY, "weights on their way to engines"),
        )
        return cls(
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory=memory.total,
            free_memory=memory.available,
            places=tuple(place for place in places if place is not None),
            gpus=gpus,
            cuda=cuda,
        )

    @property
    def rows(self) -> list[list[str]]:
        """What there is, in words."""
        gpus = [f"{name} ({size / GB:.0f} GB)" for name, size in self.gpus]
        without = "none: a build of torch for CPUs" if self.cuda is None else "none that CUDA can use"
        return [
            ["system", f"{self.system}, Python {self.python}"],
            ["GPUs", ", ".join(gpus) or without],
            ["cores", f"{self.cores}"],
            ["memory", f"{self.memory / GB:.1f} GB, {self.free_memory / GB:.1f} free"],
            *(
                [place.path, f"{place.free / GB:.1f} of {place.total / GB:.1f} GB free ({place.use})"]
                for place in self.places
            ),
        ]


def _gpus() -> tuple[tuple[tuple[str, int], ...], str | None]:
    try:
        import torch
    except ImportError:  # the packages' table says so
        return (), None
    if not torch.cuda.is_available():
        return (), torch.version.cuda
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple((one.name, int(one.total_memory)) for one in properties), torch.version.cuda
