"""The policies of a batch side by side: trained, sampling, and proximal if there is one.

The decoupled objective (arXiv 2110.00641; for language models arXiv 2505.24298) centres the trust region on a proximal
policy, and corrects for the policy that sampled by a weight: ``(prox/μ) min(r A, clip(r) A)`` with ``r = π/prox``. The
proximal policy is recomputed at the start of a step, or interpolated without a forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.batch import TokenBatch
from torchrl_moe.objectives.functional.tokens import select

__all__ = ["PolicyRatios", "Proximal", "policy_ratios"]

Proximal: TypeAlias = Literal["recomputed", "interpolated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRatios:
    """Log-ratios, ``[B, T]`` each; 0 outside their mask. ``old`` is the proximal policy, or μ if there is none."""

    log_probs: Tensor
    """log π, with its gradient."""
    old_log_probs: Tensor
    """log old, a constant."""
    log_ratio: Tensor
    """log π - log old: the argument of a surrogate."""
    sample_log_ratio: Tensor
    """log π - log μ."""
    mask: Tensor
    """bool: the tokens of the batch whose log-probs are all finite."""
    log_rho: Tensor
    """log old - log μ, or log π - log μ without a proximal policy: the mismatch to correct, a constant."""
    rho_mask: Tensor
    """bool: the tokens where the mismatch is known. With a recomputed proximal policy it does not depend on π."""

    @property
    def uncut_gradient(self) -> Tensor:
        """:attr:`log_ratio`, with the gradient of log π also where it is cut to ±20; for losses that bound ratios."""
        return self.log_ratio.detach() + self.log_probs - self.log_probs.detach()


def policy_ratios(log_probs: Tensor, batch: TokenBatch, proximal: Proximal | None) -> PolicyRatios:
    """Compare the actor's ``log_probs`` ``[B, T]`` with the policies in ``batch``."""
    sampled, known = F.log_ratio(log_probs, batch.sample_log_probs, batch.mask)
    if proximal is None:
        old, log_ratio, mask = batch.sample_log_probs, sampled, known
        log_rho, rho_mask = sampled.detach(), known
    else:
        if proximal == "interpolated":
            assert batch.staleness is not None
            old = F.interpolated_log_probs(log_probs, batch.sample_log_probs, batch.staleness)
        else:
            assert batch.prox_log_probs is not None
            old = batch.prox_log_probs
        log_ratio, mask = F.log_ratio(log_probs, old, known)
        log_rho, rho_mask = F.log_ratio(old, batch.sample_log_probs, batch.mask)
    return PolicyRatios(
        log_probs=select(mask, log_probs),
        old_log_probs=select(mask, old),
        log_ratio=log_ratio,
        sample_log_ratio=sampled,
        mask=mask,
        log_rho=log_rho,
        rho_mask=rho_mask,
    )
