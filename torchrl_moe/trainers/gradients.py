"""The norm of a gradient, and clipping it, with weights on one device or sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_moe.trainers.rank_group import Ranks

__all__ = ["by_mesh", "clip_gradients", "total_norm"]


def by_mesh(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return weights grouped by device mesh and placements: a foreach operation needs them to agree in both."""
    groups: dict[Any, list[Tensor]] = {}
    for weight in weights:
        groups.setdefault((getattr(weight, "device_mesh", None), getattr(weight, "placements", None)), []).append(
            weight
        )
    return list(groups.values())


def total_norm(groups: Iterable[Sequence[Tensor]], ranks: Ranks) -> float:
    """Return the 2-norm over groups of tensors, each of one mesh, of all ranks; NaN if that of any is not finite."""
    squares = 0.0
    for group in groups:
        norm: Any = nn.utils.get_total_norm(group)
        squares += float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2
    norms = ranks.gather(math.sqrt(squares) if math.isfinite(squares) else math.nan)
    return max(norms) if all(map(math.isfinite, norms)) else math.nan


def clip_gradients(weights: Iterable[Tensor], limit: float | None, ranks: Ranks) -> float:
    """Clip the gradient to a maximum norm; return the norm before clipping.

    Args:
        weights: those without a gradient are skipped.
        limit: maximum norm; ``None``: no clipping.
        ranks: that share the weights; all must call. All get the same norm, so either all skip a step or none does.

    Returns:
        The 2-norm over all weights of all ranks; not finite if that of any rank is not.
    """
    groups = by_mesh(weight for weight in weights if weight.grad is not None)
    total = total_norm([[weight.grad for weight in group if weight.grad is not None] for group in groups], ranks)
    if limit is not None and math.isfinite(total):
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, limit, torch.tensor(total))
    return total
