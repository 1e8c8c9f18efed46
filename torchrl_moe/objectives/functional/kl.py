r"""Penalties that keep a policy near another one, ``q``: the reference or the rollout policy.

What matters about a penalty is its gradient. It should be that of the reverse KL divergence of each token's
distribution, ``∇KL(π || q) = E_π[log(π/q) ∇log π]``. With tokens sampled from μ and ``r = π/μ`` (``sg`` stops the
gradient):

=========  =========================================  =============================================================
estimator  expected gradient of the plain penalty     off policy, weighted by r
=========  =========================================  =============================================================
``k1``     ``E_μ[∇log π]``: on policy it is 0         ``r k1``: right; of high variance
``k2``     ``E_μ[k1 ∇log π]``: right on policy only   ``sg(r) k2``: right
``k3``     ``E_μ[(1 - q/π) ∇log π]``: on policy that  ``r k3``: right, since ``∇(r k3) = r k1 ∇log π`` exactly
           of the *forward* ``KL(q || π)``
=========  =========================================  =============================================================

arXiv 2510.01555 for the plain penalties; DeepSeek-V3.2 (arXiv 2512.02556, eq. 7) for ``r k3``. The definitions, and
their values as estimates, are in :mod:`torchrl_moe.ops.divergence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torchrl_moe.objectives.functional.tokens import check_tokens, select
from torchrl_moe.ops.divergence import k1, k2, k3

__all__ = ["KLEstimator", "kl_penalty", "kl_reward", "trust_region"]

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
"""Estimators of a KL divergence from samples: :func:`~torchrl_moe.ops.k1`, ``k2`` and ``k3``."""
_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(
    log_probs: Tensor,
    other_log_probs: Tensor,
    mask: Tensor,
    estimator: KLEstimator = "k3",
    log_ratio: Tensor | None = None,
    clamp: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return per token an estimate of ``KL(π || q)``, to be used as a loss, and the mask of tokens where it is known.

    Args:
        log_probs: log π, ``[B, T]``, with a gradient.
        other_log_probs: log q, ``[B, T]``.
        mask: ``[B, T]`` bool.
        estimator: ``"k3"`` is GRPO's (arXiv 2402.03300, eq. 4); the table above gives the gradient of each.
        log_ratio: ``log π - log μ`` of :func:`log_ratio`, ``[B, T]``: weights the penalty, which then has the
            gradient of ``KL(π || q)`` off policy too. ``None``: unweighted.
        clamp: clamps each penalty, its weight included, to ``±clamp``; a clamped penalty has no gradient. k3 grows as
            ``q/π``: a single token to which q gives 4e8 times π's probability would outweigh a whole batch.

    Raises:
        ValueError: a wrong shape, or an unknown estimator.

    >>> kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
    (tensor([[0.1065]]), tensor([[True]]))
    """
    check_tokens(log_probs=log_probs, other_log_probs=other_log_probs, mask=mask)
    if estimator not in _ESTIMATORS:
        raise ValueError(f"estimator must be one of {list(_ESTIMATORS)}, got {estimator!r}.")
    known = mask & log_probs.isfinite() & other_log_probs.isfinite()
    penalty = _ESTIMATORS[estimator](select(known, log_probs), select(known, other_log_probs))
    if log_ratio is not None:
        check_tokens(log_ratio=log_ratio, mask=mask)
        ratio = torch.exp(select(known, log_ratio))
        penalty = (ratio.detach() if estimator == "k2" else ratio) * penalty
    return penalty if clamp is None else penalty.clamp(-clamp, clamp), known


def kl_reward(log_probs: Tensor, other_log_probs: Tensor, mask: Tensor, coeff: float) -> Tensor:
    """Return per token ``-coeff (log π - log q)``, a constant to be added to the rewards: ``k1`` in the reward.

    The policy gradient of this reward is that of ``-coeff KL(π || q)`` (arXiv 2510.01555). ``log_probs`` are of the
    policy that sampled. For a reward per sequence, sum over the tokens. Tokens whose value is unknown get 0.

    >>> kl_reward(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -9.0]]), torch.tensor([[True, False]]), 0.1)
    tensor([[-0.0500, -0.0000]])
    """
    check_tokens(log_probs=log_probs, other_log_probs=other_log_probs, mask=mask)
    known = mask & log_probs.isfinite() & other_log_probs.isfinite()
    return -coeff * k1(select(known, log_probs.detach()), select(known, other_log_probs.detach()))


def trust_region(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool) of ``mask`` with ``k2 = (log π - log ref)^2 / 2 <= threshold``.

    The per-token trust region of TorchRL's ``kl_mask_threshold``; k2 is Schulman's estimator, see
    :mod:`torchrl_moe.ops.divergence`. A token whose ``k2`` is unknown is outside.

    >>> log_probs, ref = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]])
    >>> trust_region(log_probs, ref, torch.tensor([[True, True]]), threshold=0.5)
    tensor([[ True, False]])
    """
    check_tokens(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    known = mask & log_probs.isfinite() & ref_log_probs.isfinite()
    return known & (k2(select(known, log_probs), select(known, ref_log_probs)) <= threshold)
