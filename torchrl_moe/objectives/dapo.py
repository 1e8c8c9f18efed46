"""``DAPO``: GRPO with Clip-Higher and a mean over tokens."""

from __future__ import annotations

from typing import Any

from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.objectives.output import DAPOLossOutput, LLMLossOutput

__all__ = ["DAPO"]


class DAPO(GRPOLoss):
    """DAPO: ``-min(r A, clip(r, 0.8, 1.28) A)``, the mean over all tokens of the batch.

    `arXiv 2503.14476 <https://arxiv.org/abs/2503.14476>`_, eq. 8 and 10: GRPO with a higher upper clip bound, which
    lets unlikely tokens grow, with sequences weighted by their length, and without a KL term. Of the paper's other
    parts, dynamic sampling is ``MCAdvantage(keep_return_bounds=...)``, and the penalty on overlong answers belongs in
    the reward.

    Args:
        actor_network: π, as for :class:`~torchrl_moe.objectives.GRPOLoss`.
        clip_epsilon: ``low`` and ``high``.
        entropy_bonus: whether to add one; the paper does not, TorchRL's class does.
        **arguments: the others of :class:`~torchrl_moe.objectives.GRPOLoss`.
    """

    output_type: type[LLMLossOutput] = DAPOLossOutput

    def __init__(
        self,
        actor_network: Any,
        *,
        clip_epsilon: float | tuple[float, float] = (0.2, 0.28),
        entropy_bonus: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(actor_network, clip_epsilon=clip_epsilon, entropy_bonus=entropy_bonus, **arguments)
