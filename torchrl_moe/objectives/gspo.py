"""``GSPOLoss``: one ratio per sequence."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.arguments import check_choice
from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.objectives.ratios import PolicyRatios

__all__ = ["GSPOLoss"]

_TOKEN_MASKS = ("mis", "icepop", "staleness_mask")


class GSPOLoss(GRPOLoss):
    """GSPO: ``-min(s A, clip(s, 1 - low, 1 + high) A)`` per sequence, ``s = (π(y) / μ(y))^(1/|y|)``.

    `arXiv 2507.18071 <https://arxiv.org/abs/2507.18071>`_, eq. 5 and 7. Clipping keeps or drops a sequence as a whole;
    s varies far less than a token's ratio, hence the narrow range. ``level="token"`` is GSPO-token (eq. 13 and 14):
    ``s_t = sg(s) π / sg(π)``, equal in value, and also in gradient if all tokens of a sequence share one advantage;
    unlike ``"sequence"``, it allows different advantages.

    With ``level="sequence"``, s contains every token, so masking a token would not remove its gradient: token masks
    (``mis``, ``icepop``, ``staleness_mask``, ``kl_mask_threshold``) are refused.

    Args:
        actor_network: π, as for :class:`~torchrl_moe.objectives.GRPOLoss`.
        level: ``"sequence"`` or ``"token"``.
        clip_epsilon: ``low`` and ``high``; default: the paper's.
        aggregation: the paper's is the mean of the sequences' means.
        entropy_bonus: whether to add one; the paper does not.
        **arguments: the others of :class:`~torchrl_moe.objectives.GRPOLoss`.

    Raises:
        ValueError: as :class:`~torchrl_moe.objectives.GRPOLoss`, and a mask of tokens with ``level="sequence"``.
    """

    def __init__(
        self,
        actor_network: Any,
        *,
        level: Literal["sequence", "token"] = "sequence",
        clip_epsilon: float | tuple[float, float] = (3e-4, 4e-4),
        aggregation: F.Aggregation = "prompt_mean",
        entropy_bonus: bool = False,
        **arguments: Any,
    ) -> None:
        check_choice("level", level, ("sequence", "token"))
        terms = {"aggregation": aggregation, "entropy_bonus": entropy_bonus, **arguments}
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **terms)
        self.level = level
        masks = [name for name in self.corrections.names if name in _TOKEN_MASKS]
        masks += [] if self.kl_mask_threshold is None else ["kl_mask_threshold"]
        if level == "sequence" and masks:
            raise ValueError(
                f"GSPOLoss(level='sequence') takes no mask of tokens, got {', '.join(masks)}: the ratio of a sequence "
                "holds all of its tokens, and a token left out would keep its gradient. Use level='token', or a mask "
                "of sequences: seq_mis, geo or k3."
            )

    def _surrogate(self, ratios: PolicyRatios, advantage: Tensor) -> tuple[Tensor, Tensor]:
        log_ratio = F.sequence_log_ratio(ratios.uncut_gradient, ratios.mask, self.level == "token")
        clip = (self.clip_epsilon_low, self.clip_epsilon_high)
        return F.clipped_surrogate(log_ratio, advantage, *clip, self.dual_clip), F.outside_clip_range(log_ratio, *clip)
