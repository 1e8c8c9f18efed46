"""Denominators of a whole batch, summed over the ranks that share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, distributed

__all__ = ["sum_over_ranks"]

Key = TypeVar("Key")
Number = TypeVar("Number", float, Tensor)


def sum_over_ranks(
    denominators: Mapping[Key, Number],
    group: distributed.ProcessGroup | None = None,
    *,
    gradients_are_averaged: bool = True,
    device: torch.device | str = "cpu",
) -> dict[Key, Number]:
    """Sum the denominators of each rank's part of a batch, in one collective for all numbers.

    With the result in each part, data parallel training gets the gradients of the whole batch, however it is split.

    Args:
        denominators: of this rank's part, see :meth:`torchrl_moe.objectives.GRPOLoss.denominators` and
            :meth:`torchrl_moe.objectives.MoERouterLoss.totals`; numbers, or tensors of counts. The same keys and shapes
            on each rank, in the same order.
        group: the ranks that share the batch; default: all.
        gradients_are_averaged: whether gradients are averaged over ranks, as DDP and FSDP do; the sums are then divided
            by the number of ranks. ``False`` if gradients are summed.
        device: of the message: one that the group's backend supports, ``"cuda"`` for NCCL.

    Returns:
        The sums: numbers for numbers; for tensors, float64 tensors on the same device.

    Raises:
        ValueError: no process group is initialised.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "sum_over_ranks needs a process group, and none is initialised: call torch.distributed.init_process_group "
            "first. A single process can use the denominators of its batch directly."
        )
    given = list(denominators.values())
    tensors = [torch.as_tensor(value, dtype=torch.float64) for value in given]
    numbers = torch.cat([tensor.flatten().to(device) for tensor in tensors])
    distributed.all_reduce(numbers, group=group)
    if gradients_are_averaged:
        numbers /= distributed.get_world_size(group)
    sums = []
    for value, tensor, part in zip(given, tensors, numbers.split([t.numel() for t in tensors]), strict=True):
        total = part.view(tensor.shape).to(tensor.device)
        sums.append(cast(Number, total if isinstance(value, Tensor) else total.item()))
    return dict(zip(denominators, sums, strict=True))
