"""The maths of the losses: pure functions of tensors. No tensordict, no module, no state; torch only.

Policies, of one sampled token: ``π`` is trained, ``μ`` generated the token, ``ref`` is the reference, ``prox`` the
proximal policy of the decoupled objective. A surrogate is a function of ``ℓ = log π - log old``, where ``old`` is μ,
or prox in the decoupled objective. ``A`` is the advantage. Letters: B sequences, T tokens of the longest; every
per-token argument is ``[B, T]``. A ``mask`` (bool) selects the tokens that count; every mean documents its denominator.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.objectives.functional.aggregation import Aggregation as Aggregation
    from torchrl_moe.objectives.functional.aggregation import aggregate as aggregate
    from torchrl_moe.objectives.functional.aggregation import entropy_bonus as entropy_bonus
    from torchrl_moe.objectives.functional.aggregation import sequence_count as sequence_count
    from torchrl_moe.objectives.functional.kl import KLEstimator as KLEstimator
    from torchrl_moe.objectives.functional.kl import kl_penalty as kl_penalty
    from torchrl_moe.objectives.functional.kl import kl_reward as kl_reward
    from torchrl_moe.objectives.functional.kl import trust_region as trust_region
    from torchrl_moe.objectives.functional.ratio import effective_sample_size as effective_sample_size
    from torchrl_moe.objectives.functional.ratio import interpolated_log_probs as interpolated_log_probs
    from torchrl_moe.objectives.functional.ratio import log_ratio as log_ratio
    from torchrl_moe.objectives.functional.ratio import sequence_log_ratio as sequence_log_ratio
    from torchrl_moe.objectives.functional.surrogates import Divergence as Divergence
    from torchrl_moe.objectives.functional.surrogates import cispo_surrogate as cispo_surrogate
    from torchrl_moe.objectives.functional.surrogates import clipped_surrogate as clipped_surrogate
    from torchrl_moe.objectives.functional.surrogates import dppo_surrogate as dppo_surrogate
    from torchrl_moe.objectives.functional.surrogates import outside_clip_range as outside_clip_range
    from torchrl_moe.objectives.functional.surrogates import outside_divergence as outside_divergence
    from torchrl_moe.objectives.functional.surrogates import sapo_surrogate as sapo_surrogate
    from torchrl_moe.objectives.functional.weights import geometric_mean_within as geometric_mean_within
    from torchrl_moe.objectives.functional.weights import k3_mean_below as k3_mean_below
    from torchrl_moe.objectives.functional.weights import off_policy_negatives as off_policy_negatives
    from torchrl_moe.objectives.functional.weights import sequence_weight as sequence_weight
    from torchrl_moe.objectives.functional.weights import staleness_weight as staleness_weight
    from torchrl_moe.objectives.functional.weights import token_weight as token_weight
    from torchrl_moe.objectives.functional.weights import weight_within as weight_within
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "Aggregation": ".aggregation",
            "Divergence": ".surrogates",
            "KLEstimator": ".kl",
            "aggregate": ".aggregation",
            "cispo_surrogate": ".surrogates",
            "clipped_surrogate": ".surrogates",
            "dppo_surrogate": ".surrogates",
            "effective_sample_size": ".ratio",
            "entropy_bonus": ".aggregation",
            "geometric_mean_within": ".weights",
            "interpolated_log_probs": ".ratio",
            "k3_mean_below": ".weights",
            "kl_penalty": ".kl",
            "kl_reward": ".kl",
            "log_ratio": ".ratio",
            "off_policy_negatives": ".weights",
            "outside_clip_range": ".surrogates",
            "outside_divergence": ".surrogates",
            "sapo_surrogate": ".surrogates",
            "sequence_count": ".aggregation",
            "sequence_log_ratio": ".ratio",
            "sequence_weight": ".weights",
            "staleness_weight": ".weights",
            "token_weight": ".weights",
            "trust_region": ".kl",
            "weight_within": ".weights",
        },
    )
