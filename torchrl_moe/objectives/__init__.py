"""Losses over rollouts (namesake: ``torchrl.objectives.llm``).

``functional`` is the maths, torch only; a loss module reads tensordict keys, calls it and writes keys. No model and no
engine is imported here: an actor is anything with a ``score`` method, see :mod:`torchrl_moe.objectives.actors`.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.objectives.advantages import DrGRPOAdvantage as DrGRPOAdvantage
    from torchrl_moe.objectives.advantages import ReinforcePlusPlusAdvantage as ReinforcePlusPlusAdvantage
    from torchrl_moe.objectives.advantages import RLOOAdvantage as RLOOAdvantage
    from torchrl_moe.objectives.grpo import GRPOLoss as GRPOLoss
    from torchrl_moe.objectives.grpo import GRPOLossOutput as GRPOLossOutput
    from torchrl_moe.objectives.mismatch import CollapseThresholds as CollapseThresholds
    from torchrl_moe.objectives.mismatch import MismatchKeys as MismatchKeys
    from torchrl_moe.objectives.mismatch import MismatchMetrics as MismatchMetrics
    from torchrl_moe.objectives.moe_router import MoERouterLoss as MoERouterLoss
    from torchrl_moe.objectives.moe_router import MoERouterLossOutput as MoERouterLossOutput
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "CollapseThresholds": ".mismatch",
            "DrGRPOAdvantage": ".advantages",
            "GRPOLoss": ".grpo",
            "GRPOLossOutput": ".grpo",
            "MismatchKeys": ".mismatch",
            "MismatchMetrics": ".mismatch",
            "MoERouterLoss": ".moe_router",
            "MoERouterLossOutput": ".moe_router",
            "RLOOAdvantage": ".advantages",
            "ReinforcePlusPlusAdvantage": ".advantages",
        },
    )
