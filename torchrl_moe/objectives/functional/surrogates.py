"""The policy's loss per token, one function for each paper. Gradients flow through ``ℓ``, or through ``log π``."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torchrl_moe.objectives.functional.tokens import check_tokens

__all__ = [
    "Divergence",
    "cispo_surrogate",
    "clipped_surrogate",
    "dppo_surrogate",
    "outside_clip_range",
    "outside_divergence",
    "sapo_surrogate",
]

Divergence: TypeAlias = Literal["tv", "kl"]
"""What DPPO's trust region bounds: total variation, or KL."""

_SMALLEST = 1e-7  # of 1 - p: keeps log(1 - p) finite where p is 1


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float, dual_clip: float | None = None
) -> Tensor:
    """Return per token ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(ℓ)``.

    PPO's clipped surrogate (arXiv 1707.06347, eq. 7), per token as in GRPO (arXiv 2402.03300, eq. 3). ``low`` and
    ``high`` may differ: DAPO's Clip-Higher (arXiv 2503.14476, eq. 10). With ``dual_clip = c`` the ratio of a negative
    advantage counts at most c: the loss is at most ``-c A``, without a gradient beyond that (arXiv 1912.09729).

    >>> ratio, advantage = torch.tensor([[1.5, 1.5, 0.5]]), torch.tensor([[1.0, -1.0, -1.0]])
    >>> clipped_surrogate(ratio.log(), advantage, 0.2, 0.28)
    tensor([[-1.2800,  1.5000,  0.8000]])
    """
    check_tokens(log_ratio=log_ratio, advantage=advantage)
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantage, _clip(ratio, low, high) * advantage)
    if dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)


def outside_clip_range(log_ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Return the tokens (bool) whose ratio lies outside ``[1 - low, 1 + high]``, whatever their advantage.

    Their share is the clip fraction. With a positive advantage only those above, with a negative one only those below
    lose their gradient in :func:`clipped_surrogate` (arXiv 1707.06347, eq. 7).

    >>> outside_clip_range(torch.tensor([[0.5, 1.0, 1.25]]).log(), 0.2, 0.28)
    tensor([[ True, False, False]])
    """
    check_tokens(log_ratio=log_ratio)
    ratio = log_ratio.exp()
    return (ratio < 1 - low) | (ratio > 1 + high)


def cispo_surrogate(
    log_ratio: Tensor, log_probs: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float
) -> Tensor:
    """Return per token ``-sg(clip(r, 1 - low, 1 + high)) A log π``.

    CISPO, arXiv 2506.13585, eq. 4: the clipped weight is a constant (``sg``), so every token keeps a gradient.

    >>> log_probs = torch.tensor([[-1.0, -1.0]])
    >>> cispo_surrogate(torch.tensor([[1.5, 0.5]]).log(), log_probs, torch.tensor([[1.0, -1.0]]), 0.2, 0.28)
    tensor([[ 1.2800, -0.8000]])
    """
    check_tokens(log_ratio=log_ratio, log_probs=log_probs, advantage=advantage)
    return -_clip(log_ratio.detach().exp(), low, high) * advantage * log_probs


def outside_divergence(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantage: Tensor,
    low: Tensor | float,
    high: Tensor | float,
    divergence: Divergence = "tv",
) -> Tensor:
    """Return the tokens (bool) that DPPO blocks: they left the trust region, and their gradient would lead further out.

    With p = π(token) and q = old(token), a token is blocked if ``A > 0, p > q, D > high`` or ``A < 0, p < q, D > low``.
    D compares the distributions over {the token, any other}: ``"tv"`` is ``|p - q|``, ``"kl"`` is ``q log(q / p) + (1 -
    q) log((1 - q) / (1 - p))``. arXiv 2602.04879, the binary approximations of its trust region.

    >>> old, new = torch.tensor([[0.5, 0.5, 0.01]]).log(), torch.tensor([[0.8, 0.6, 0.05]]).log()
    >>> outside_divergence(new, old, torch.ones(1, 3), 0.15, 0.15)
    tensor([[ True, False, False]])
    """
    check_tokens(log_probs=log_probs, old_log_probs=old_log_probs, advantage=advantage)
    log_p, log_q = log_probs.detach(), old_log_probs
    p, q = log_p.exp(), log_q.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        distance = q * (log_q - log_p) + (1 - q) * (_log_complement(log_q) - _log_complement(log_p))
    return ((advantage > 0) & (p > q) & (distance > high)) | ((advantage < 0) & (p < q) & (distance > low))


def dppo_surrogate(log_ratio: Tensor, advantage: Tensor, blocked: Tensor, max_ratio: float) -> Tensor:
    """Return per token ``-min(r, max_ratio) A``, and 0 for the blocked ones.

    DPPO, arXiv 2602.04879: the surrogate of a ratio that is not clipped, under the mask of :func:`outside_divergence`.
    The cap bounds the weight of a token with an extreme ratio, but keeps its gradient, ``-min(r, max_ratio) A ∇ℓ``.

    >>> ratio, blocked = torch.tensor([[1.5, 50.0, 1.5]]), torch.tensor([[False, False, True]])
    >>> dppo_surrogate(ratio.log(), torch.ones(1, 3), blocked, max_ratio=20.0)
    tensor([[ -1.5000, -20.0000,   0.0000]])
    """
    check_tokens(log_ratio=log_ratio, advantage=advantage, blocked=blocked)
    weight = log_ratio.detach().exp().clamp(max=max_ratio)
    one = (log_ratio - log_ratio.detach()).exp()  # with the gradient of ℓ
    return torch.where(blocked, 0.0, -weight * one * advantage)


def sapo_surrogate(log_ratio: Tensor, advantage: Tensor, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """Return per token ``-(4 / τ) σ(τ (r - 1)) A``, τ ``positive`` where ``A > 0`` and ``negative`` elsewhere.

    SAPO's soft gate, arXiv 2511.20347. On policy its gradient is that of ``-r A``; it decreases as r moves away from 1
    on either side, faster with a larger τ.

    >>> sapo_surrogate(torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]))
    tensor([[-2.0000,  1.9048]])
    """
    check_tokens(log_ratio=log_ratio, advantage=advantage)
    temperature = torch.where(advantage > 0, positive, negative).to(log_ratio.dtype)
    return -4 / temperature * (temperature * (log_ratio.exp() - 1)).sigmoid() * advantage


def _clip(ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return ratio.clamp(torch.as_tensor(1 - low).to(ratio), torch.as_tensor(1 + high).to(ratio))


def _log_complement(log_p: Tensor) -> Tensor:
    """``log(1 - p)``, finite where p is 1."""
    return (-torch.expm1(log_p)).clamp(min=_SMALLEST).log()
