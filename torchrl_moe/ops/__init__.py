"""Numerical building blocks of the losses: log-probs without logits, means with a named denominator, divergences.

Torch only: nothing here knows a policy, a tensordict or an objective.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.ops.divergence import LOG_RATIO_LIMIT as LOG_RATIO_LIMIT
    from torchrl_moe.ops.divergence import bounded_log_ratio as bounded_log_ratio
    from torchrl_moe.ops.divergence import extreme_fraction as extreme_fraction
    from torchrl_moe.ops.divergence import k1 as k1
    from torchrl_moe.ops.divergence import k2 as k2
    from torchrl_moe.ops.divergence import k3 as k3
    from torchrl_moe.ops.divergence import masked_mean as masked_mean
    from torchrl_moe.ops.log_probs import LogitTransform as LogitTransform
    from torchrl_moe.ops.log_probs import selected_log_probs as selected_log_probs
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "LOG_RATIO_LIMIT": ".divergence",
            "LogitTransform": ".log_probs",
            "bounded_log_ratio": ".divergence",
            "extreme_fraction": ".divergence",
            "k1": ".divergence",
            "k2": ".divergence",
            "k3": ".divergence",
            "masked_mean": ".divergence",
            "selected_log_probs": ".log_probs",
        },
    )
