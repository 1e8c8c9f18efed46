"""Losses over rollouts (namesake: ``torchrl.objectives.llm``).

``functional`` is the maths, torch only; a loss module reads tensordict keys, calls it and writes keys. No model and no
engine is imported here: an actor is anything with a ``score`` method, see :mod:`torchrl_moe.objectives.actors`.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.objectives.grpo import GRPOLoss as GRPOLoss
    from torchrl_moe.objectives.grpo import GRPOLossOutput as GRPOLossOutput
else:
    __getattr__, __dir__, __all__ = attach(__name__, {"GRPOLoss": ".grpo", "GRPOLossOutput": ".grpo"})
