"""Trainers on several ranks: all read sharded weights together, rank 0 writes, and all learn the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchrl_moe._errors import WeightSyncError

__all__ = ["agreed", "dtypes_of_first", "from_first", "is_first"]

FAILED = -1
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def is_first() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not torch.distributed.is_available() or not torch.distributed.is_initialized() or _rank() == 0


def from_first(value: int) -> int:
    """Return rank 0's value; all ranks must call it."""
    return _gathered([value])[0][0]


def dtypes_of_first(dtypes: Sequence[torch.dtype | None]) -> list[torch.dtype | None]:
    """Return the floating dtypes of rank 0, which alone knows the engine's; all ranks must call it, with as many."""
    codes = _gathered([FLOATS.index(dtype) if dtype in FLOATS else FAILED for dtype in dtypes])[0]
    return [None if code == FAILED else FLOATS[code] for code in codes]


def agreed(compute: Callable[[], int]) -> int:
    """Let every rank compute a value, and return rank 0's; all must call it, and none waits for one that failed.

    Args:
        compute: returns a non-negative value; its error is raised unchanged.

    Raises:
        WeightSyncError: another rank failed.
    """
    value = FAILED
    try:
        value = compute()
    finally:
        values = [found for (found,) in _gathered([value])]
    if FAILED in values:
        raise WeightSyncError(f"rank {values.index(FAILED)} could not begin to publish; see the error of that rank")
    return values[0]


def _gathered(values: Sequence[int]) -> list[list[int]]:
    """Return the values of all ranks; all must call it, with as many."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [list(values)]
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    boxes = torch.zeros(torch.distributed.get_world_size(), len(values), dtype=torch.int64, device=device)
    own = torch.tensor(values, dtype=torch.int64, device=device)
    torch.distributed.all_gather(list(boxes), own)
    found: list[list[int]] = boxes.tolist()
    return found


def _rank() -> int:
    return int(torch.distributed.get_rank())
