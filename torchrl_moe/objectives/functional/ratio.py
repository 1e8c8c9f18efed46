"""Ratios of two policies on the sampled tokens, and the proximal policy of a decoupled objective."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_moe.objectives.functional.tokens import check_tokens, select, sequence_mean
from torchrl_moe.ops.divergence import bounded_log_ratio

__all__ = ["effective_sample_size", "interpolated_log_probs", "log_ratio", "sequence_log_ratio"]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``ℓ = log π - log old`` and the mask of the tokens whose ``ℓ`` is known.

    A token with a log-prob that is NaN or infinite is removed from the mask; its ``ℓ`` is 0 and carries no gradient.
    ``ℓ`` is clamped to ±20. With μ, the engine that sampled, as the old policy, ``exp(ℓ)`` is the ratio of GRPO's eq. 3
    (arXiv 2402.03300).

    >>> nan = float("nan")
    >>> log_ratio(torch.tensor([[-1.0, -1.0]]), torch.tensor([[nan, -1.5]]), torch.tensor([[True, True]]))
    (tensor([[0.0000, 0.5000]]), tensor([[False,  True]]))
    """
    check_tokens(log_probs=log_probs, old_log_probs=old_log_probs, mask=mask)
    known = mask & log_probs.isfinite() & old_log_probs.isfinite()
    return bounded_log_ratio(select(known, log_probs), select(known, old_log_probs)), known


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, per_token_gradient: bool = False) -> Tensor:
    """Return GSPO's ``log s``, the mean of ``ℓ`` over a sequence's tokens, for each token: ``[B, T]``.

    ``s = (π(y) / old(y))^(1/|y|)``, arXiv 2507.18071, eq. 7. With ``per_token_gradient`` it is that of GSPO-token (eq.
    14): the same value, but token t has the gradient of its own ``log π`` only.

    >>> sequence_log_ratio(torch.tensor([[0.1, 0.3, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([[0.2000, 0.2000, 0.2000]])
    """
    check_tokens(log_ratio=log_ratio, mask=mask)
    mean = sequence_mean(log_ratio, mask)
    return mean.detach() + log_ratio - log_ratio.detach() if per_token_gradient else mean


def interpolated_log_probs(log_probs: Tensor, sample_log_probs: Tensor, staleness: Tensor) -> Tensor:
    """Return A-3PO's proximal policy, a constant: ``log prox = log π + (log μ - log π) / d``. No forward pass.

    arXiv 2512.06547: d weight updates lie between μ and π; the proximal policy is one update before π, and log-probs
    are assumed to change evenly. ``d = 0``, for tokens sampled by the weights being trained, is treated as 1: μ is
    then the proximal policy, the centre of the trust region.

    Args:
        log_probs: log π, ``[B, T]``.
        sample_log_probs: log μ, ``[B, T]``.
        staleness: d, integers ``[B, T]``.

    >>> interpolated_log_probs(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, -3.0]]), torch.tensor([[1, 4]]))
    tensor([[-3.0000, -1.5000]])
    """
    check_tokens(log_probs=log_probs, sample_log_probs=sample_log_probs, staleness=staleness)
    current = log_probs.detach()
    return current + (sample_log_probs - current) / staleness.clamp(min=1)


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return ``(Σ r)^2 / (n Σ r^2)`` over the n tokens of ``mask``: 1 if all ratios are equal, ``1/n`` at worst.

    Kish's effective sample size as a share of n, as TorchRL's ``"ESS"``; 0 for an empty mask.

    >>> effective_sample_size(torch.tensor([[1.0, 3.0, 100.0]]).log(), torch.tensor([[True, True, False]]))
    tensor(0.8000)
    """
    check_tokens(log_ratio=log_ratio, mask=mask)
    weights = log_ratio.detach().masked_fill(~mask, float("-inf")).flatten()
    share = (2 * weights.logsumexp(0) - (2 * weights).logsumexp(0)).exp() / mask.sum()
    return torch.where(mask.any(), share, torch.zeros_like(share))
