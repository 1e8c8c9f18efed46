"""What losses are divided by, of a whole batch: over its parts, and over the ranks that share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import distributed

__all__ = ["sum_over_ranks"]

Key = TypeVar("Key")


def sum_over_ranks(
    denominators: Mapping[Key, float],
    group: distributed.ProcessGroup | None = None,
    *,
    gradients_are_averaged: bool = True,
    device: torch.device | str = "cpu",
) -> dict[Key, float]:
    """Add up what each rank's part of a batch divides by: a collective, one message for all numbers.

    With the result in each part, the gradients that data parallel training puts together are those of the whole batch,
    whatever was split how.

    Args:
        denominators: of this rank's part, see :meth:`torchrl_moe.objectives.GRPOLoss.denominators`; the same keys on
            each rank, in the same order.
        group: the ranks that share the batch; default: all.
        gradients_are_averaged: as DDP and FSDP do; the numbers are then divided by how many ranks there are. ``False``
            if gradients are summed.
        device: where the message is built: the one that the group's backend speaks, ``"cuda"`` for NCCL.

    Raises:
        ValueError: no process group has been started.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "sum_over_ranks needs a process group, and none is initialised: call torch.distributed.init_process_group "
            "first. On a single process the denominators are those of the batch as they are."
        )
    numbers = torch.tensor(list(denominators.values()), dtype=torch.float64, device=device)
    distributed.all_reduce(numbers, group=group)
    if gradients_are_averaged:
        numbers /= distributed.get_world_size(group)
    return dict(zip(denominators, numbers.tolist(), strict=True))
