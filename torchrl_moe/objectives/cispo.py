"""``CISPOLoss``: clips the importance weight, and lets no gradient flow through it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.arguments import check_no_dual_clip
from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.objectives.output import CISPOLossOutput, LLMLossOutput
from torchrl_moe.objectives.ratios import PolicyRatios

__all__ = ["CISPOLoss"]


class CISPOLoss(GRPOLoss):
    """CISPO: ``-sg(clip(r, 1 - low, 1 + high)) A log π`` per token; ``sg`` stops the gradient.

    `arXiv 2506.13585 <https://arxiv.org/abs/2506.13585>`_, eq. 4 and 5: every token keeps a gradient, even if its
    weight is clipped. In TorchRL's ``CISPOLoss`` the gradient flows through the clipped weight, so clipped tokens get
    none.

    Args:
        actor_network: π, as for :class:`~torchrl_moe.objectives.GRPOLoss`.
        clip_epsilon: ``low`` and ``high``. The paper bounds the weight only from above, and does not give the bound;
            the default is a weight of at most 5, as TRL recommends after ScaleRL (arXiv 2510.13786).
        entropy_bonus: whether to add one; the paper does not, TorchRL's class does.
        **arguments: the others of :class:`~torchrl_moe.objectives.GRPOLoss`, except ``dual_clip``.
    """

    output_type: type[LLMLossOutput] = CISPOLossOutput

    def __init__(
        self,
        actor_network: Any,
        *,
        clip_epsilon: float | tuple[float, float] = (1.0, 4.0),
        entropy_bonus: bool = False,
        **arguments: Any,
    ) -> None:
        check_no_dual_clip(type(self), arguments)
        super().__init__(actor_network, clip_epsilon=clip_epsilon, entropy_bonus=entropy_bonus, **arguments)

    def _surrogate(self, ratios: PolicyRatios, advantage: Tensor) -> tuple[Tensor, Tensor]:
        clip = (self.clip_epsilon_low, self.clip_epsilon_high)
        loss = F.cispo_surrogate(ratios.log_ratio, ratios.log_probs, advantage, *clip)
        return loss, F.outside_clip_range(ratios.log_ratio, *clip)
