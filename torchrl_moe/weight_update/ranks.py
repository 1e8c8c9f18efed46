"""Trainers of several ranks: all read sharded weights together, rank 0 writes, and all learn how that went."""

from __future__ import annotations

import torch

__all__ = ["from_first", "is_first"]


def is_first() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not torch.distributed.is_available() or not torch.distributed.is_initialized() or _rank() == 0


def from_first(value: int) -> int:
    """Return rank 0's value; all ranks must ask."""
    if not torch.distributed.is_initialized():
        return value
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    box = torch.tensor([value], dtype=torch.int64, device=device)
    torch.distributed.broadcast(box, src=0)
    return int(box.item())


def _rank() -> int:
    return int(torch.distributed.get_rank())
