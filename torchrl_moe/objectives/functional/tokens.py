"""Tensors with a value per token, ``[B, T]``, and their sums and means over a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_moe import _checks
from torchrl_moe.ops.masked import masked_mean

__all__ = ["check_tokens", "select", "sequence_mean", "sequence_sum"]


def check_tokens(**per_token: Tensor) -> None:
    """Raise ValueError unless all have the same two dimensions.

    >>> check_tokens(mask=torch.ones(3))
    Traceback (most recent call last):
    ValueError: mask must have 2 dimensions, got 1: shape [3]. It is [B, T], a value per token.
    """
    for name, tensor in per_token.items():
        _checks.check_rank(name, tensor, 2, hint="It is [B, T], a value per token.")
    _checks.check_same_shape(per_token)


def select(mask: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` where ``mask`` is set, else 0.

    Apply it to the inputs of a formula, not to its result: only then does a NaN outside the mask reach no gradient.

    >>> select(torch.tensor([True, False]), torch.tensor([2.0, float("nan")]))
    tensor([2., 0.])
    """
    return torch.where(mask, value, value.new_zeros(()))


def sequence_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over the tokens of ``mask``, for each token of the sequence: ``[B, T]``.

    >>> sequence_sum(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, False]]))
    tensor([[3., 3., 3.]])
    """
    return masked_mean(value, mask, 1.0, dim=-1)[:, None].expand(value.shape)


def sequence_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens of ``mask``, for each token of the sequence: ``[B, T]``; 0 without any.

    >>> sequence_mean(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, False]]))
    tensor([[1.5000, 1.5000, 1.5000]])
    """
    return masked_mean(value, mask, mask.sum(-1), dim=-1)[:, None].expand(value.shape)
