"""Losses over rollouts (namesake: ``torchrl.objectives.llm``).

``functional`` is the maths, torch only; a loss module reads tensordict keys, calls it and writes keys. No model and no
engine is imported here: an actor is anything with a ``score`` method, see :mod:`torchrl_moe.objectives.actors`.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.objectives.actors import ScoringActor as ScoringActor
    from torchrl_moe.objectives.advantages import DrGRPOAdvantage as DrGRPOAdvantage
    from torchrl_moe.objectives.advantages import GroupAdvantage as GroupAdvantage
    from torchrl_moe.objectives.advantages import GRPOAdvantage as GRPOAdvantage
    from torchrl_moe.objectives.advantages import ReinforcePlusPlusAdvantage as ReinforcePlusPlusAdvantage
    from torchrl_moe.objectives.advantages import RLOOAdvantage as RLOOAdvantage
    from torchrl_moe.objectives.cispo import CISPOLoss as CISPOLoss
    from torchrl_moe.objectives.corrections import Correction as Correction
    from torchrl_moe.objectives.corrections import Thresholds as Thresholds
    from torchrl_moe.objectives.dapo import DAPO as DAPO
    from torchrl_moe.objectives.dppo import DPPOLoss as DPPOLoss
    from torchrl_moe.objectives.grpo import GRPOLoss as GRPOLoss
    from torchrl_moe.objectives.gspo import GSPOLoss as GSPOLoss
    from torchrl_moe.objectives.inputs import LossKeys as LossKeys
    from torchrl_moe.objectives.mismatch import CollapseThresholds as CollapseThresholds
    from torchrl_moe.objectives.mismatch import MismatchKeys as MismatchKeys
    from torchrl_moe.objectives.mismatch import MismatchMetrics as MismatchMetrics
    from torchrl_moe.objectives.moe_router import MoERouterLoss as MoERouterLoss
    from torchrl_moe.objectives.moe_router import MoERouterLossOutput as MoERouterLossOutput
    from torchrl_moe.objectives.normalisation import sum_over_ranks as sum_over_ranks
    from torchrl_moe.objectives.output import GRPOLossOutput as GRPOLossOutput
    from torchrl_moe.objectives.sapo import SAPOLoss as SAPOLoss
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "DAPO": ".dapo",
            "CISPOLoss": ".cispo",
            "CollapseThresholds": ".mismatch",
            "Correction": ".corrections",
            "DPPOLoss": ".dppo",
            "DrGRPOAdvantage": ".advantages",
            "GRPOAdvantage": ".advantages",
            "GRPOLoss": ".grpo",
            "GRPOLossOutput": ".output",
            "GSPOLoss": ".gspo",
            "GroupAdvantage": ".advantages",
            "LossKeys": ".inputs",
            "MismatchKeys": ".mismatch",
            "MismatchMetrics": ".mismatch",
            "MoERouterLoss": ".moe_router",
            "MoERouterLossOutput": ".moe_router",
            "RLOOAdvantage": ".advantages",
            "ReinforcePlusPlusAdvantage": ".advantages",
            "SAPOLoss": ".sapo",
            "ScoringActor": ".actors",
            "Thresholds": ".corrections",
            "sum_over_ranks": ".normalisation",
        },
    )
