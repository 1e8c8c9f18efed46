"""``SAPOLoss``: a soft gate instead of a clip."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_moe._checks import check_number, shown
from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.arguments import check_no_dual_clip
from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.objectives.ratios import PolicyRatios

__all__ = ["SAPOLoss"]


class SAPOLoss(GRPOLoss):
    """SAPO: ``-(4 / τ) σ(τ (r - 1)) A`` per token, with one τ for ``A > 0`` and another for ``A <= 0``.

    `arXiv 2511.20347 <https://arxiv.org/abs/2511.20347>`_. The gate's slope weights a token's gradient: 1 on policy,
    decreasing smoothly as r moves away from 1, where a clip would cut it off.

    Args:
        actor_network: π, as for :class:`~torchrl_moe.objectives.GRPOLoss`.
        temperatures: τ for positive and for other advantages; default: the paper's.
        aggregation: the paper's is the mean of the sequences' means.
        entropy_bonus: whether to add one; the paper does not.
        **arguments: the others of :class:`~torchrl_moe.objectives.GRPOLoss`, except ``dual_clip``. Nothing is clipped:
            ``clip_epsilon`` only says which ratios ``clip_fraction`` counts.
    """

    def __init__(
        self,
        actor_network: Any,
        *,
        temperatures: tuple[float, float] = (1.0, 1.05),
        aggregation: F.Aggregation = "prompt_mean",
        entropy_bonus: bool = False,
        **arguments: Any,
    ) -> None:
        if not isinstance(temperatures, tuple | list) or len(temperatures) != 2:
            raise ValueError(f"temperatures must be two positive numbers, got {shown(temperatures)}.")
        for temperature in temperatures:
            check_number("temperatures", temperature, above=0)
        check_no_dual_clip(type(self), arguments)
        super().__init__(actor_network, aggregation=aggregation, entropy_bonus=entropy_bonus, **arguments)
        self.temperatures = tuple(temperatures)

    def _surrogate(self, ratios: PolicyRatios, advantage: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.sapo_surrogate(ratios.log_ratio, advantage, *self.temperatures)
        return loss, F.outside_clip_range(ratios.log_ratio, self.clip_epsilon_low, self.clip_epsilon_high)
