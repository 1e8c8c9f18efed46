"""Trainers of several ranks: all read sharded weights together, rank 0 writes, and all learn the outcome."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchrl_moe._errors import WeightSyncError

__all__ = ["agreed", "from_first", "is_first"]

FAILED = -1


def is_first() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not torch.distributed.is_available() or not torch.distributed.is_initialized() or _rank() == 0


def from_first(value: int) -> int:
    """Return rank 0's value; all ranks must ask."""
    return _gathered(value)[0]


def agreed(compute: Callable[[], int]) -> int:
    """Let every rank compute a value, and return rank 0's; all must ask, and none waits for one that failed.

    Args:
        compute: returns a non-negative value; its error is raised unchanged.

    Raises:
        WeightSyncError: another rank failed.
    """
    value = FAILED
    try:
        value = compute()
    finally:
        values = _gathered(value)
    if FAILED in values:
        raise WeightSyncError(f"rank {values.index(FAILED)} could not begin to publish; see the error of that rank")
    return values[0]


def _gathered(value: int) -> list[int]:
    """Return the values of all ranks, which must all ask."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [value]
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    boxes = torch.zeros(torch.distributed.get_world_size(), 1, dtype=torch.int64, device=device)
    own = torch.tensor([value], dtype=torch.int64, device=device)
    torch.distributed.all_gather(list(boxes), own)
    return [int(found) for found in boxes.flatten().tolist()]


def _rank() -> int:
    return int(torch.distributed.get_rank())
