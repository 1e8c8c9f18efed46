"""``DPPOLoss``: a trust region defined by a divergence instead of a ratio."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor

from torchrl_moe._checks import check_number
from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.arguments import check_choice, check_no_dual_clip
from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.objectives.ratios import PolicyRatios

__all__ = ["DPPOLoss"]

_THRESHOLDS = {"tv": 0.15, "kl": 0.05}


class DPPOLoss(GRPOLoss):
    """DPPO: ``-M r A`` per token; ``M = 0`` if the token left the trust region and would move further out.

    `arXiv 2602.04879 <https://arxiv.org/abs/2602.04879>`_. A token is outside if ``D > high`` for ``A > 0, r > 1``, or
    ``D > low`` for ``A < 0, r < 1``, where D compares the probabilities that old and new policy give to the token, not
    their ratio: the probability of an unlikely token may double, that of a likely one may not halve. D is defined in
    :func:`~torchrl_moe.objectives.functional.outside_divergence`.

    The paper's trust region is centred on the policy that sampled: leave ``proximal_policy`` unset for it.

    Args:
        actor_network: π, as for :class:`~torchrl_moe.objectives.GRPOLoss`.
        divergence: ``"tv"``, total variation, or ``"kl"``.
        clip_epsilon: the thresholds of D, ``low`` and ``high``; default: 0.15 of ``"tv"``, 0.05 of ``"kl"``.
        max_ratio: the cap of r.
        entropy_bonus: whether to add one; the paper does not.
        **arguments: the others of :class:`~torchrl_moe.objectives.GRPOLoss`, except ``dual_clip``.
    """

    def __init__(
        self,
        actor_network: Any,
        *,
        divergence: F.Divergence = "tv",
        clip_epsilon: float | tuple[float, float] | None = None,
        max_ratio: float = 20.0,
        entropy_bonus: bool = False,
        **arguments: Any,
    ) -> None:
        check_choice("divergence", divergence, get_args(F.Divergence))
        check_number("max_ratio", max_ratio, 1, infinite=True, hint="It is 1 on policy.")
        check_no_dual_clip(type(self), arguments)
        threshold = _THRESHOLDS[divergence] if clip_epsilon is None else clip_epsilon
        super().__init__(actor_network, clip_epsilon=threshold, entropy_bonus=entropy_bonus, **arguments)
        self.divergence, self.max_ratio = divergence, max_ratio

    def _surrogate(self, ratios: PolicyRatios, advantage: Tensor) -> tuple[Tensor, Tensor]:
        limits = (self.clip_epsilon_low, self.clip_epsilon_high)
        blocked = F.outside_divergence(ratios.log_probs, ratios.old_log_probs, advantage, *limits, self.divergence)
        return F.dppo_surrogate(ratios.uncut_gradient, advantage, blocked, self.max_ratio), blocked
