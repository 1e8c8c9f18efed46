"""Numerical building blocks of the losses: log-probs without logits, means with a named denominator, divergences.

Torch only: nothing here knows a policy, a tensordict or an objective.
"""

from torchrl_moe.ops.divergence import LOG_RATIO_LIMIT, bounded_log_ratio, extreme_fraction, k1, k2, k3, masked_mean
from torchrl_moe.ops.log_probs import LogitTransform, selected_log_probs

__all__ = [
    "LOG_RATIO_LIMIT",
    "LogitTransform",
    "bounded_log_ratio",
    "extreme_fraction",
    "k1",
    "k2",
    "k3",
    "masked_mean",
    "selected_log_probs",
]
