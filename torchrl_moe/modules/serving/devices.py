"""Which GPUs the local replicas of a service compute on: those that the user names, else free ones."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, cast

import torch

__all__ = ["Device", "DeviceSets", "Devices", "devices_of_trainer", "ranks_here", "visible_devices"]

Device: TypeAlias = int | str | torch.device
Devices: TypeAlias = Sequence[Device | Sequence[Device]]
"""One entry per replica: its GPU, or a list of them."""


def visible_devices() -> list[str]:
    """Return the names of the CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` spells them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if named is None else [name.strip() for name in named.split(",")]
    return names[:count]


def ranks_here() -> int:
    """Return how many of several ranks a launcher such as ``torchrun`` has started on this machine; 0 without one.

    Each computes on the device of its number.
    """
    is_one_of_several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if is_one_of_several else 0


def devices_of_trainer() -> list[int]:
    """Return the indices of the devices that the trainer computes on.

    They are this process's, once it has begun: the current one, and those that it fills; and those of a launcher's
    ranks on this machine, whether they have begun or not.
    """
    count = torch.cuda.device_count()
    found = set(range(min(ranks_here(), count)))
    if torch.cuda.is_initialized():
        found |= {torch.cuda.current_device(), *(index for index in range(count) if torch.cuda.memory_reserved(index))}
    return sorted(found)


class DeviceSets:
    """The sets of devices for replicas, and which replica has which.

    Args:
        devices: the user's choice, one entry per replica; ``None``: the devices that the trainer does not compute on.
        num_replicas: how many there are at the start.
        per_replica: how many devices each needs.
        listed: returns the indices of the current replicas, once some were added: the others no longer need their
            devices.

    Raises:
        ValueError: there are too few devices, the user names one that does not exist, or names another number than
            needed.
    """

    def __init__(
        self,
        devices: Devices | None,
        num_replicas: int,
        per_replica: int,
        listed: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._visible, self._per_replica, self._listed = visible_devices(), per_replica, listed
        self._of_trainer = [self._visible[index] for index in devices_of_trainer()] if self._visible else []
        named = None if devices is None else _named(devices, self._visible, num_replicas, per_replica)
        taken = set(self._of_trainer if named is None else itertools.chain(self._of_trainer, *named))
        free = [name for name in self._visible if name not in taken]
        left = [free[at : at + per_replica] for at in range(0, len(free) - per_replica + 1, per_replica)]
        self._sets = [",".join(names) for names in [*(named or []), *left]]
        self._places: dict[int, int] = {}  # which set a replica has
        self._check(num_replicas)
        self._places = {index: index for index in range(num_replicas)}

    def of(self, index: int) -> str | None:
        """Return a replica's devices, as a value of ``CUDA_VISIBLE_DEVICES``; ``None`` on a machine without GPUs.

        A restarted replica keeps its own; an added one gets a free set.

        Raises:
            ValueError: there are GPUs, but none left.
        """
        if not self._visible:
            return None
        if index not in self._places:
            taken = {self._places[other] for other in self._listed() if other in self._places}
            place = next(place for place in itertools.count() if place not in taken)
            self._check(place + 1)
            self._places[index] = place
        return self._sets[self._places[index]]

    def _check(self, num_replicas: int) -> None:
        if not self._visible or num_replicas <= len(self._sets):
            return
        own = f", and the trainer computes on {', '.join(self._of_trainer)}" if self._of_trainer else ""
        raise ValueError(
            f"{num_replicas} replicas of {self._per_replica} GPU(s) need {num_replicas * self._per_replica}, but "
            f"{len(self._visible)} are visible ({', '.join(self._visible)}){own}. Use fewer replicas, a smaller "
            "tensor_parallel_size, or name the devices to share: devices=[[0], ...]"
        )


def _named(devices: Devices, visible: list[str], num_replicas: int, per_replica: int) -> list[list[str]]:
    """Return the names of the devices that the user wants, one list per replica."""
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise ValueError(f"devices={devices!r}: give a list with one entry per replica, such as [[0], [1]]")
    if not visible:
        raise ValueError(f"devices={list(devices)!r}, but torch sees no CUDA device")
    if len(devices) != num_replicas:
        raise ValueError(f"devices={list(devices)!r} has {len(devices)} entries, for {num_replicas} replicas")
    sets = []
    for replica, entry in enumerate(devices):
        one = isinstance(entry, str) or not isinstance(entry, Sequence)
        names = [_name(device, visible) for device in cast(Sequence[Device], [entry] if one else entry)]
        if len(names) != per_replica or len(set(names)) != per_replica:
            raise ValueError(
                f"devices: replica {replica} needs {per_replica} different GPU(s) (tensor, pipeline and data parallel "
                f"ranks), got {entry!r}"
            )
        sets.append(names)
    return sets


def _name(device: Device, visible: list[str]) -> str:
    """Return how the environment spells a device that is torch's, by its index, or spelled like that already."""
    if isinstance(device, str) and device in visible and not device.isdecimal():
        return device
    try:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        where = torch.device("cpu")
    if where.type != "cuda" or where.index is None or not 0 <= where.index < len(visible):
        raise ValueError(
            f"devices: there is no {device!r}; there are 'cuda:0' to 'cuda:{len(visible) - 1}', in this process's own "
            f"numbers ({', '.join(visible)} by name)"
        )
    return visible[where.index]
