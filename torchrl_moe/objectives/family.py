"""GRPO's relatives, each with its own surrogate: CISPO, DAPO, DPPO, GSPO, SAPO."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor

from torchrl_moe._checks import check_choice, check_number, shown
from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.corrections import PolicyRatios
from torchrl_moe.objectives.grpo import CISPOLossOutput, DAPOLossOutput, GRPOLoss, LLMLossOutput


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
    _takes_dual_clip = False

    def __init__(
        self,
        actor_network: object,
        *,
        clip_epsilon: float | tuple[float, float] = (1.0, 4.0),
        entropy_bonus: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(actor_network, clip_epsilon=clip_epsilon, entropy_bonus=entropy_bonus, **arguments)

    def _surrogate(self, ratios: PolicyRatios, advantage: Tensor) -> tuple[Tensor, Tensor]:
        clip = (self.clip_epsilon_low, self.clip_epsilon_high)
        loss = F.cispo_surrogate(ratios.log_ratio, ratios.log_probs, advantage, *clip)
        return loss, F.outside_clip_range(ratios.log_ratio, *clip)


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
        actor_network: object,
        *,
        clip_epsilon: float | tuple[float, float] = (0.2, 0.28),
        entropy_bonus: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(actor_network, clip_epsilon=clip_epsilon, entropy_bonus=entropy_bonus, **arguments)


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

    _takes_dual_clip = False

    def __init__(
        self,
        actor_network: object,
        *,
        divergence: F.Divergence = "tv",
        clip_epsilon: float | tuple[float, float] | None = None,
        max_ratio: float = 20.0,
        entropy_bonus: bool = False,
        **arguments: Any,
    ) -> None:
        check_choice("divergence", divergence, get_args(F.Divergence))
        check_number("max_ratio", max_ratio, 1, infinite=True, hint="It is 1 on policy.")
        if clip_epsilon is None:
            clip_epsilon = 0.15 if divergence == "tv" else 0.05
        super().__init__(actor_network, clip_epsilon=clip_epsilon, entropy_bonus=entropy_bonus, **arguments)
        self.divergence, self.max_ratio = divergence, max_ratio

    def _surrogate(self, ratios: PolicyRatios, advantage: Tensor) -> tuple[Tensor, Tensor]:
        limits = (self.clip_epsilon_low, self.clip_epsilon_high)
        blocked = F.outside_divergence(ratios.log_probs, ratios.old_log_probs, advantage, *limits, self.divergence)
        return F.dppo_surrogate(ratios.uncut_gradient, advantage, blocked, self.max_ratio), blocked


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
        actor_network: object,
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
        masks = [name for name in self.corrections.names if name in ("mis", "icepop", "staleness_mask")]
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

    _takes_dual_clip = False

    def __init__(
        self,
        actor_network: object,
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
        super().__init__(actor_network, aggregation=aggregation, entropy_bonus=entropy_bonus, **arguments)
        self.temperatures = tuple(temperatures)

    def _surrogate(self, ratios: PolicyRatios, advantage: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.sapo_surrogate(ratios.log_ratio, advantage, *self.temperatures)
        return loss, F.outside_clip_range(ratios.log_ratio, self.clip_epsilon_low, self.clip_epsilon_high)
