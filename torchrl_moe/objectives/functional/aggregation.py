"""How per-token losses become one loss, and what it is divided by."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torchrl_moe.objectives.functional.tokens import check_tokens, select
from torchrl_moe.ops.masked import masked_mean

__all__ = ["Aggregation", "aggregate", "entropy_bonus", "sequence_count"]

Aggregation: TypeAlias = Literal["token_mean", "prompt_mean", "sequence_mean", "fixed_length", "none"]
"""How per-token losses become one loss; see :func:`aggregate`."""


def entropy_bonus(entropy: Tensor, coeff: Tensor | float) -> Tensor:
    """Return per token ``-coeff H``: added to a loss, it keeps the policy from collapsing (arXiv 1707.06347, eq. 9).

    >>> entropy_bonus(torch.tensor([[2.0]]), 0.01)
    tensor([[-0.0200]])
    """
    check_tokens(entropy=entropy)
    return -coeff * entropy


def sequence_count(mask: Tensor, aggregation: Aggregation) -> Tensor:
    """Return how many sequences ``aggregation`` divides by: for sequence_mean those with a token, else all.

    >>> mask = torch.tensor([[True, True], [False, False]])
    >>> sequence_count(mask, "prompt_mean"), sequence_count(mask, "sequence_mean")
    (tensor(2), tensor(1))
    """
    check_tokens(mask=mask)
    return mask.any(-1).sum() if aggregation == "sequence_mean" else torch.as_tensor(len(mask), device=mask.device)


def aggregate(
    value: Tensor,
    mask: Tensor,
    aggregation: Aggregation = "token_mean",
    *,
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
    fixed_length: int | None = None,
) -> Tensor:
    """Return the loss of a batch from its per-token losses ``x``. With n_i tokens of sequence i in the mask:

    - ``"token_mean"``: ``Σ_i Σ_t x / num_tokens``; long sequences weigh more (DAPO, arXiv 2503.14476, eq. 8);
    - ``"prompt_mean"``: ``Σ_i (Σ_t x / n_i) / num_sequences``; all sequences weigh the same (GRPO, arXiv 2402.03300,
      eq. 3; TorchRL's name); one without a token counts as 0;
    - ``"sequence_mean"``: the same over the sequences that have a token;
    - ``"fixed_length"``: ``Σ_i Σ_t x / (num_sequences * fixed_length)``, so that no length is favoured (Dr. GRPO, arXiv
      2503.20783, sec. 3.2); with a ``fixed_length`` of 1 it is the mean of the sequences' sums;
    - ``"none"``: ``x``, and 0 outside the mask, ``[B, T]``.

    Args:
        value: x, ``[B, T]``.
        mask: ``[B, T]`` bool, the tokens that count.
        aggregation: one of the above.
        num_tokens: tokens of the whole batch, if ``mask`` is a part of it; the losses of the parts then sum to that of
            the batch. Default: those of ``mask``.
        num_sequences: the same for sequences. Default: see :func:`sequence_count`.
        fixed_length: tokens that ``"fixed_length"`` divides each sequence by.

    >>> value, mask = torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    >>> aggregate(value, mask), aggregate(value, mask, "prompt_mean"), aggregate(value, mask, num_tokens=6)
    (tensor(3.), tensor(3.5000), tensor(1.5000))
    >>> aggregate(value, mask, "fixed_length", fixed_length=10)
    tensor(0.4500)
    """
    check_tokens(value=value, mask=mask)
    if aggregation == "none":
        return select(mask, value)
    if aggregation == "token_mean":
        return masked_mean(value, mask, mask.sum() if num_tokens is None else num_tokens)
    sequences = sequence_count(mask, aggregation) if num_sequences is None else num_sequences
    if aggregation == "fixed_length":
        if fixed_length is None:
            raise ValueError("aggregation='fixed_length' needs fixed_length, the tokens to divide each sequence by.")
        return masked_mean(value, mask, sequences * fixed_length)
    if aggregation in ("prompt_mean", "sequence_mean"):
        per_sequence = masked_mean(value, mask, mask.sum(-1), dim=-1)
        return masked_mean(per_sequence, torch.ones_like(per_sequence, dtype=torch.bool), sequences)
    raise ValueError(f"aggregation must be one of {list(get_args(Aggregation))}, got {aggregation!r}.")
