"""Weights and masks of tokens and sequences, for the mismatch between two policies; all are constants.

``log_rho`` is ``log ρ = log old - log μ``, ``[B, T]``: how much likelier the sampled token is under the old policy than
under the policy that sampled it. ``ρ(y) = Π ρ`` is the sequence's. Sums and means are over the tokens of ``mask``.
:mod:`torchrl_moe.objectives.corrections` names and combines these functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_moe.objectives.functional.tokens import check_tokens, sequence_mean, sequence_sum
from torchrl_moe.ops.divergence import LOG_RATIO_LIMIT

__all__ = [
    "geometric_mean_within",
    "k3_mean_below",
    "off_policy_negatives",
    "sequence_weight",
    "staleness_weight",
    "token_weight",
    "weight_within",
]


def token_weight(log_rho: Tensor) -> Tensor:
    """Return ``ρ``: the importance weight of each token.

    >>> token_weight(torch.tensor([[0.5, 2.0]]).log())
    tensor([[0.5000, 2.0000]])
    """
    check_tokens(log_rho=log_rho)
    return torch.exp(log_rho.detach())


def sequence_weight(log_rho: Tensor, mask: Tensor) -> Tensor:
    """Return ``ρ(y)``, the product over a sequence's tokens, for each token; its logarithm is clamped to ±20.

    >>> sequence_weight(torch.tensor([[0.5, 3.0, 9.0]]).log(), torch.tensor([[True, True, False]]))
    tensor([[1.5000, 1.5000, 1.5000]])
    """
    check_tokens(log_rho=log_rho, mask=mask)
    return sequence_sum(log_rho.detach(), mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def weight_within(weight: Tensor, low: float, high: float) -> Tensor:
    """Return the tokens (bool) with ``low <= weight <= high``.

    >>> weight_within(torch.tensor([[0.4, 1.0, 6.0]]), 0.5, 5.0)
    tensor([[False,  True, False]])
    """
    check_tokens(weight=weight)
    return (weight >= low) & (weight <= high)


def geometric_mean_within(log_rho: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Return the tokens (bool) of the sequences with ``low <= ρ(y)^(1/|y|) <= high``.

    >>> log_rho, mask = torch.tensor([[0.1, -0.1], [0.1, 0.1]]), torch.ones(2, 2, dtype=torch.bool)
    >>> geometric_mean_within(log_rho, mask, 0.99, 1.01)
    tensor([[ True,  True],
            [False, False]])
    """
    check_tokens(log_rho=log_rho, mask=mask)
    return weight_within(sequence_mean(log_rho.detach(), mask).exp(), low, high)


def k3_mean_below(log_rho: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Return the tokens (bool) of the sequences whose mean ``ρ - 1 - log ρ`` is at most ``limit``.

    The mean estimates ``KL(μ || old)`` (k3). Unlike the geometric mean, it detects differences of either sign.

    >>> log_rho, mask = torch.tensor([[0.1, -0.1], [0.2, -0.2]]), torch.ones(2, 2, dtype=torch.bool)
    >>> k3_mean_below(log_rho, mask, 0.01)
    tensor([[ True,  True],
            [False, False]])
    """
    check_tokens(log_rho=log_rho, mask=mask)
    log_rho = log_rho.detach()
    return sequence_mean(torch.expm1(log_rho) - log_rho, mask) <= limit


def off_policy_negatives(log_ratio: Tensor, advantage: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool) with ``A < 0`` in sequences whose mean ``log μ - log π`` exceeds ``threshold``.

    These are the tokens that off-policy sequence masking drops: DeepSeek-V3.2, arXiv 2512.02556, eq. 9. ``log_ratio``
    is ``log π
    - log μ``, of the policy as it is now.

    >>> advantage, mask = torch.tensor([[-1.0, 1.0]]), torch.tensor([[True, True]])
    >>> off_policy_negatives(torch.tensor([[-0.2, -0.1]]), advantage, mask, 0.1)
    tensor([[ True, False]])
    """
    check_tokens(log_ratio=log_ratio, advantage=advantage, mask=mask)
    return (advantage < 0) & (sequence_mean(-log_ratio.detach(), mask) > threshold)


def staleness_weight(staleness: Tensor) -> Tensor:
    """Return ``1 / max(1, d)``: the more weight updates d ago a token was sampled, the less it counts.

    The step size of staleness-aware SGD (arXiv 1511.05950), token by token.

    >>> staleness_weight(torch.tensor([[0, 1, 4]]))
    tensor([[1.0000, 1.0000, 0.2500]])
    """
    check_tokens(staleness=staleness)
    return 1 / staleness.clamp(min=1)
