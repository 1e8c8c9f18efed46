"""The maths of the losses: pure functions of tensors. No tensordict, no module, no state.

Policies, of one sampled token: ``π`` is trained, ``μ`` generated the token, ``ref`` is the reference; ``ℓ = log π - log
μ``. ``A`` is the advantage. Letters: B sequences, T tokens of the longest; every per-token argument is ``[B, T]``. A
``mask`` (bool) says which tokens count; every mean names what it divides by.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torchrl_moe import _checks
from torchrl_moe.ops.divergence import bounded_log_ratio, k2, k3
from torchrl_moe.ops.masked import masked_mean

__all__ = [
    "Aggregation",
    "aggregate",
    "clipped_surrogate",
    "effective_sample_size",
    "entropy_bonus",
    "kl_penalty",
    "log_ratio",
    "outside_clip_range",
    "sequence_count",
    "trust_region",
]

Aggregation: TypeAlias = Literal["token_mean", "prompt_mean", "sequence_mean", "fixed_length", "none"]


def _check_tokens(**per_token: Tensor) -> None:
    for name, tensor in per_token.items():
        _checks.check_rank(name, tensor, 2, hint="It is [B, T], a value per token.")
    _checks.check_same_shape(per_token)


def log_ratio(log_probs: Tensor, sample_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``ℓ = log π - log μ`` and the mask of the tokens whose ``ℓ`` is known.

    A token with a log-prob that is NaN or infinite leaves the mask; its ``ℓ`` is 0 and carries no gradient. ``ℓ`` is
    cut to ±20. It is the ratio of GRPO's eq. 3 (arXiv 2402.03300), with μ, the engine that sampled, as the old policy.

    >>> nan = float("nan")
    >>> log_ratio(torch.tensor([[-1.0, -1.0]]), torch.tensor([[nan, -1.5]]), torch.tensor([[True, True]]))
    (tensor([[0.0000, 0.5000]]), tensor([[False,  True]]))
    """
    _check_tokens(log_probs=log_probs, sample_log_probs=sample_log_probs, mask=mask)
    known = mask & log_probs.isfinite() & sample_log_probs.isfinite()
    return bounded_log_ratio(_where(known, log_probs), _where(known, sample_log_probs)), known


def _where(mask: Tensor, value: Tensor) -> Tensor:
    """``value`` where ``mask`` is set, else 0: applied to inputs, so that a NaN there reaches no gradient."""
    return torch.where(mask, value, value.new_zeros(()))


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Return per token ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(ℓ)``.

    PPO's clipped surrogate (arXiv 1707.06347, eq. 7), per token as in GRPO (arXiv 2402.03300, eq. 3). ``low`` and
    ``high`` may differ: DAPO's Clip-Higher (arXiv 2503.14476, eq. 10).

    >>> ratio, advantage = torch.tensor([[1.5, 1.5, 0.5]]), torch.tensor([[1.0, -1.0, -1.0]])
    >>> clipped_surrogate(ratio.log(), advantage, 0.2, 0.28)
    tensor([[-1.2800,  1.5000,  0.8000]])
    """
    _check_tokens(log_ratio=log_ratio, advantage=advantage)
    ratio = log_ratio.exp()
    floor, ceiling = torch.as_tensor(1 - low).to(ratio), torch.as_tensor(1 + high).to(ratio)
    return -torch.minimum(ratio * advantage, ratio.clamp(floor, ceiling) * advantage)


def outside_clip_range(log_ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Return the tokens (bool) whose ratio lies outside ``[1 - low, 1 + high]``, whatever their advantage.

    Their share is the clip fraction. With a positive advantage only those above, with a negative one only those below
    lose their gradient in :func:`clipped_surrogate` (arXiv 1707.06347, eq. 7).

    >>> outside_clip_range(torch.tensor([[0.5, 1.0, 1.25]]).log(), 0.2, 0.28)
    tensor([[ True, False, False]])
    """
    _check_tokens(log_ratio=log_ratio)
    ratio = log_ratio.exp()
    return (ratio < 1 - low) | (ratio > 1 + high)


def kl_penalty(log_probs: Tensor, other_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return per token ``k3 = q/π - 1 - log(q/π)`` with ``q`` the other policy, and the tokens where it is known.

    GRPO's estimate of ``KL(π || q)`` (arXiv 2402.03300, eq. 4). As a loss on tokens sampled from π, its expected
    gradient is that of ``KL(q || π)``; on tokens sampled from another policy it is that of neither (arXiv 2510.01555).

    >>> kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
    (tensor([[0.1065]]), tensor([[True]]))
    """
    _check_tokens(log_probs=log_probs, other_log_probs=other_log_probs, mask=mask)
    known = mask & log_probs.isfinite() & other_log_probs.isfinite()
    return k3(_where(known, log_probs), _where(known, other_log_probs)), known


def trust_region(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool) of ``mask`` with ``k2 = (log π - log ref)^2 / 2 <= threshold``.

    The per-token trust region of TorchRL's ``kl_mask_threshold``; k2 is Schulman's estimator, see
    :mod:`torchrl_moe.ops.divergence`. A token whose ``k2`` is not known is outside.

    >>> log_probs, ref = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]])
    >>> trust_region(log_probs, ref, torch.tensor([[True, True]]), threshold=0.5)
    tensor([[ True, False]])
    """
    _check_tokens(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    known = mask & log_probs.isfinite() & ref_log_probs.isfinite()
    return known & (k2(_where(known, log_probs), _where(known, ref_log_probs)) <= threshold)


def entropy_bonus(entropy: Tensor, coeff: Tensor | float) -> Tensor:
    """Return per token ``-coeff H``: added to a loss, it keeps the policy from collapsing (arXiv 1707.06347, eq. 9).

    >>> entropy_bonus(torch.tensor([[2.0]]), 0.01)
    tensor([[-0.0200]])
    """
    _check_tokens(entropy=entropy)
    return -coeff * entropy


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return ``(Σ r)^2 / (n Σ r^2)`` over the n tokens of ``mask``: 1 if all ratios are equal, ``1/n`` at worst.

    Kish's effective sample size as a share of n, as TorchRL's ``"ESS"``; 0 for an empty mask.

    >>> effective_sample_size(torch.tensor([[1.0, 3.0, 100.0]]).log(), torch.tensor([[True, True, False]]))
    tensor(0.8000)
    """
    _check_tokens(log_ratio=log_ratio, mask=mask)
    weights = log_ratio.detach().masked_fill(~mask, float("-inf")).flatten()
    share = (2 * weights.logsumexp(0) - (2 * weights).logsumexp(0)).exp() / mask.sum()
    return torch.where(mask.any(), share, torch.zeros_like(share))


def sequence_count(mask: Tensor, aggregation: Aggregation) -> Tensor:
    """Return how many sequences ``aggregation`` divides by: those with a token for sequence_mean, else all.

    >>> mask = torch.tensor([[True, True], [False, False]])
    >>> sequence_count(mask, "prompt_mean"), sequence_count(mask, "sequence_mean")
    (tensor(2), tensor(1))
    """
    _check_tokens(mask=mask)
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
    """Return the loss of a batch from that of its tokens, ``x``. With n_i tokens of sequence i in the mask:

    - ``"token_mean"``: ``Σ_i Σ_t x / num_tokens``, long sequences weigh more (DAPO, arXiv 2503.14476, eq. 8);
    - ``"prompt_mean"``: ``Σ_i (Σ_t x / n_i) / num_sequences``, sequences weigh the same (GRPO, arXiv 2402.03300, eq.
      3; TorchRL's name); one without a token counts, as 0;
    - ``"sequence_mean"``: the same over the sequences that have a token;
    - ``"fixed_length"``: ``Σ_i Σ_t x / (num_sequences * fixed_length)``, so that no length is favoured (Dr. GRPO, arXiv
      2503.20783, sec. 3.2); with a ``fixed_length`` of 1 it is the mean of the sequences' sums;
    - ``"none"``: ``x``, and 0 outside the mask, ``[B, T]``.

    Args:
        value: x, ``[B, T]``.
        mask: ``[B, T]`` bool, the tokens that count.
        aggregation: one of the above.
        num_tokens: of the whole batch, if ``mask`` is a part of it: then the parts' losses sum to the batch's. Default:
            those of ``mask``.
        num_sequences: the same for sequences. Default: see :func:`sequence_count`.
        fixed_length: tokens that ``"fixed_length"`` divides each sequence by.

    >>> value, mask = torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    >>> aggregate(value, mask), aggregate(value, mask, "prompt_mean"), aggregate(value, mask, num_tokens=6)
    (tensor(3.), tensor(3.5000), tensor(1.5000))
    >>> aggregate(value, mask, "fixed_length", fixed_length=10)
    tensor(0.4500)
    """
    _check_tokens(value=value, mask=mask)
    if aggregation == "none":
        return _where(mask, value)
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
