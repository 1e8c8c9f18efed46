"""Losses over rollouts (namesake: ``torchrl.objectives.llm``).

``functional`` holds the maths, in torch only; a loss module reads tensordict keys, calls those functions and writes
keys. No model and no
engine is imported here: an actor is anything with a ``score`` method, see :mod:`torchrl_moe.objectives.batch`.

What a script imports from ``torchrl.objectives.llm`` is here under the same name. Classes that need no change are
TorchRL's own and load on first use, because they import vllm, ray and transformers.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl.objectives.llm import DistillationLoss as DistillationLoss
    from torchrl.objectives.llm import DistillationLossOutput as DistillationLossOutput
    from torchrl.objectives.llm import MCAdvantage as MCAdvantage
    from torchrl.objectives.llm import MCAdvantageSelector as MCAdvantageSelector
    from torchrl.objectives.llm import RayMCAdvantage as RayMCAdvantage
    from torchrl.objectives.llm import SFTLoss as SFTLoss
    from torchrl.objectives.llm import SFTLossOutput as SFTLossOutput
    from torchrl.objectives.llm import k3_kl_token_estimate as k3_kl_token_estimate

    from torchrl_moe.objectives.advantages import DrGRPOAdvantage as DrGRPOAdvantage
    from torchrl_moe.objectives.advantages import GroupAdvantage as GroupAdvantage
    from torchrl_moe.objectives.advantages import GRPOAdvantage as GRPOAdvantage
    from torchrl_moe.objectives.advantages import ReinforcePlusPlusAdvantage as ReinforcePlusPlusAdvantage
    from torchrl_moe.objectives.advantages import RLOOAdvantage as RLOOAdvantage
    from torchrl_moe.objectives.batch import LossKeys as LossKeys
    from torchrl_moe.objectives.batch import ScoringActor as ScoringActor
    from torchrl_moe.objectives.corrections import Correction as Correction
    from torchrl_moe.objectives.corrections import Thresholds as Thresholds
    from torchrl_moe.objectives.family import DAPO as DAPO
    from torchrl_moe.objectives.family import CISPOLoss as CISPOLoss
    from torchrl_moe.objectives.family import DPPOLoss as DPPOLoss
    from torchrl_moe.objectives.family import GSPOLoss as GSPOLoss
    from torchrl_moe.objectives.family import SAPOLoss as SAPOLoss
    from torchrl_moe.objectives.grpo import CISPOLossOutput as CISPOLossOutput
    from torchrl_moe.objectives.grpo import DAPOLossOutput as DAPOLossOutput
    from torchrl_moe.objectives.grpo import GRPOLoss as GRPOLoss
    from torchrl_moe.objectives.grpo import GRPOLossOutput as GRPOLossOutput
    from torchrl_moe.objectives.grpo import LLMLossOutput as LLMLossOutput
    from torchrl_moe.objectives.grpo import sum_over_ranks as sum_over_ranks
    from torchrl_moe.objectives.mismatch import CollapseThresholds as CollapseThresholds
    from torchrl_moe.objectives.mismatch import MismatchKeys as MismatchKeys
    from torchrl_moe.objectives.mismatch import MismatchMetrics as MismatchMetrics
    from torchrl_moe.objectives.moe_router import MoERouterLoss as MoERouterLoss
    from torchrl_moe.objectives.moe_router import MoERouterLossOutput as MoERouterLossOutput
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".advantages": "DrGRPOAdvantage GRPOAdvantage GroupAdvantage RLOOAdvantage ReinforcePlusPlusAdvantage",
            ".batch": "LossKeys ScoringActor",
            ".corrections": "Correction Thresholds",
            ".family": "DAPO CISPOLoss DPPOLoss GSPOLoss SAPOLoss",
            ".grpo": "CISPOLossOutput DAPOLossOutput GRPOLoss GRPOLossOutput LLMLossOutput sum_over_ranks",
            ".mismatch": "CollapseThresholds MismatchKeys MismatchMetrics",
            ".moe_router": "MoERouterLoss MoERouterLossOutput",
            "torchrl.objectives.llm": "DistillationLoss DistillationLossOutput MCAdvantage MCAdvantageSelector "
            "RayMCAdvantage SFTLoss SFTLossOutput k3_kl_token_estimate",
        },
    )
