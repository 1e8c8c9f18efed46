"""The one mean of the package: a sum over a mask, divided by a denominator that the caller names.

An implicit denominator is the most common fault of LLM losses: a mean over pads, or over a micro-batch where the whole
batch was meant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_moe import _checks

__all__ = ["masked_mean"]


def masked_mean(value: Tensor, mask: Tensor, denominator: Tensor | float, dim: int | None = None) -> Tensor:
    """Return the sum of ``value`` where ``mask`` is set, divided by ``denominator``.

    Values are selected, not multiplied: what lies under a cleared mask may be NaN. Sums run in float32 at least.

    Args:
        value: floating point, any shape.
        mask: bool, same shape.
        denominator: a number, or a tensor of the result's shape (or ``[]``). Where it is 0 the sum is returned as it
            is: the mean of nothing is 0.
        dim: the dimension to sum over; ``None`` for all.

    >>> value, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[True, True], [True, False]])
    >>> masked_mean(value, mask, mask.sum())
    tensor(2.3333)
    >>> masked_mean(value, mask, mask.sum(-1), dim=-1)
    tensor([1.5000, 4.0000])
    """
    _checks.check_same_shape({"value": value, "mask": mask})
    _checks.check_floating("value", value)
    kept = torch.where(mask, value, value.new_zeros(()))
    dtype = torch.promote_types(value.dtype, torch.float32)
    total = kept.sum(dtype=dtype) if dim is None else kept.sum(dim, dtype=dtype)
    divisor = torch.as_tensor(denominator, dtype=dtype, device=value.device)
    if divisor.ndim:
        _checks.check_same_shape({"denominator": divisor, "sum of value": total})
    return total / torch.where(divisor == 0, divisor.new_ones(()), divisor)
