"""The maths of the losses: pure functions of tensors. No tensordict, no module, no state; torch only.

Policies, of one sampled token: ``π`` is trained, ``μ`` generated the token, ``ref`` is the reference, ``prox`` the
proximal policy of the decoupled objective. A surrogate is a function of ``ℓ = log π - log old``, where ``old`` is μ,
or prox in the decoupled objective. ``A`` is the advantage. Letters: B sequences, T tokens of the longest; every
per-token argument is ``[B, T]``. A ``mask`` (bool) selects the tokens that count; every mean documents its denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torchrl_moe import _checks
from torchrl_moe.ops.divergence import LOG_RATIO_LIMIT, bounded_log_ratio, k1, k2, k3, masked_mean

__all__ = [
    "Aggregation",
    "Divergence",
    "KLEstimator",
    "aggregate",
    "cispo_surrogate",
    "clipped_surrogate",
    "dppo_surrogate",
    "effective_sample_size",
    "entropy_bonus",
    "geometric_mean_within",
    "interpolated_log_probs",
    "k3_mean_below",
    "kl_penalty",
    "kl_reward",
    "log_ratio",
    "off_policy_negatives",
    "outside_clip_range",
    "outside_divergence",
    "sapo_surrogate",
    "sequence_count",
    "sequence_log_ratio",
    "sequence_weight",
    "staleness_weight",
    "token_weight",
    "trust_region",
    "weight_within",
]


def check_tokens(**per_token: Tensor) -> None:
    """Raise ValueError unless all have the same two dimensions.

    >>> check_tokens(mask=torch.ones(3))
    Traceback (most recent call last):
    ValueError: mask must have 2 dimensions, got 1: shape [3]. It is [B, T], a value per token.
    """
    for name, tensor in per_token.items():
        _checks.check_rank(name, tensor, 2, hint="It is [B, T], a value per token.")
    _checks.check_same_shape(per_token)


def select(mask: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` where ``mask`` is set, else 0.

    Apply it to the inputs of a formula, not to its result: only then does a NaN outside the mask reach no gradient.

    >>> select(torch.tensor([True, False]), torch.tensor([2.0, float("nan")]))
    tensor([2., 0.])
    """
    return torch.where(mask, value, value.new_zeros(()))


def sequence_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over the tokens of ``mask``, for each token of the sequence: ``[B, T]``.

    >>> sequence_sum(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, False]]))
    tensor([[3., 3., 3.]])
    """
    return masked_mean(value, mask, 1.0, dim=-1)[:, None].expand(value.shape)


def sequence_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens of ``mask``, for each token of the sequence: ``[B, T]``; 0 without any.

    >>> sequence_mean(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, False]]))
    tensor([[1.5000, 1.5000, 1.5000]])
    """
    return masked_mean(value, mask, mask.sum(-1), dim=-1)[:, None].expand(value.shape)


Aggregation: TypeAlias = Literal["token_mean", "prompt_mean", "sequence_mean", "fixed_length", "none"]
"""How per-token losses become one loss; see :func:`aggregate`."""
AGGREGATIONS = get_args(Aggregation)


def entropy_bonus(entropy: Tensor, coeff: Tensor | float) -> Tensor:
    """Return per token ``-coeff H``: added to a loss, it keeps the policy from collapsing (arXiv 1707.06347, eq. 9).

    >>> entropy_bonus(torch.tensor([[2.0]]), 0.01)
    tensor([[-0.0200]])
    """
    check_tokens(entropy=entropy)
    return -coeff * entropy


def sequence_count(mask: Tensor, aggregation: Aggregation) -> Tensor:
    """Return how many sequences ``aggregation`` divides by: for sequence_mean those with a token, else all.

    >>> mask = torch.tensor([[True, True], [False, False]])
    >>> sequence_count(mask, "prompt_mean"), sequence_count(mask, "sequence_mean")
    (tensor(2), tensor(1))
    """
    check_tokens(mask=mask)
    return mask.any(-1).sum() if aggregation == "sequence_mean" else torch.as_tensor(len(mask), device=mask.device)


def aggregate(
    value: Tensor,
    mask: Tensor,
    aggregation: Aggregation = "token_mean",
    *,
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
    fixed_length: int | None = None,
) -> Tensor:
    """Return the loss of a batch from its per-token losses ``x``. With n_i tokens of sequence i in the mask:

    - ``"token_mean"``: ``Σ_i Σ_t x / num_tokens``; long sequences weigh more (DAPO, arXiv 2503.14476, eq. 8);
    - ``"prompt_mean"``: ``Σ_i (Σ_t x / n_i) / num_sequences``; all sequences weigh the same (GRPO, arXiv 2402.03300,
      eq. 3; TorchRL's name); one without a token counts as 0;
    - ``"sequence_mean"``: the same over the sequences that have a token;
    - ``"fixed_length"``: ``Σ_i Σ_t x / (num_sequences * fixed_length)``, so that no length is favoured (Dr. GRPO, arXiv
      2503.20783, sec. 3.2); with a ``fixed_length`` of 1 it is the mean of the sequences' sums;
    - ``"none"``: ``x``, and 0 outside the mask, ``[B, T]``.

    Args:
        value: x, ``[B, T]``.
        mask: ``[B, T]`` bool, the tokens that count.
        aggregation: one of the above.
        num_tokens: of the whole batch, if ``mask`` is a part of it; the losses of the parts then sum to that of the
            batch. Default: those of ``mask``.
        num_sequences: the same for sequences. Default: see :func:`sequence_count`.
        fixed_length: tokens that ``"fixed_length"`` divides each sequence by.

    >>> value, mask = torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    >>> aggregate(value, mask), aggregate(value, mask, "prompt_mean"), aggregate(value, mask, num_tokens=6)
    (tensor(3.), tensor(3.5000), tensor(1.5000))
    >>> aggregate(value, mask, "fixed_length", fixed_length=10)
    tensor(0.4500)
    """
    check_tokens(value=value, mask=mask)
    if aggregation == "none":
        return select(mask, value)
    if aggregation == "token_mean":
        return masked_mean(value, mask, mask.sum() if num_tokens is None else num_tokens)
    sequences = sequence_count(mask, aggregation) if num_sequences is None else num_sequences
    if aggregation == "fixed_length":
        if fixed_length is None:
            raise ValueError("aggregation='fixed_length' needs fixed_length, the tokens to divide each sequence by.")
        return masked_mean(value, mask, sequences * fixed_length)
    _checks.check_choice("aggregation", aggregation, AGGREGATIONS)
    per_sequence = masked_mean(value, mask, mask.sum(-1), dim=-1)
    return masked_mean(per_sequence, torch.ones_like(per_sequence, dtype=torch.bool), sequences)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``ℓ = log π - log old`` and the mask of the tokens whose ``ℓ`` is known.

    A token with a log-prob that is NaN or infinite is removed from the mask; its ``ℓ`` is 0 and carries no gradient.
    ``ℓ`` is clamped to ±20. With μ, the engine that sampled, as the old policy, ``exp(ℓ)`` is the ratio of GRPO's eq. 3
    (arXiv 2402.03300).

    >>> nan = float("nan")
    >>> log_ratio(torch.tensor([[-1.0, -1.0]]), torch.tensor([[nan, -1.5]]), torch.tensor([[True, True]]))
    (tensor([[0.0000, 0.5000]]), tensor([[False,  True]]))
    """
    check_tokens(log_probs=log_probs, old_log_probs=old_log_probs, mask=mask)
    known = mask & log_probs.isfinite() & old_log_probs.isfinite()
    return bounded_log_ratio(select(known, log_probs), select(known, old_log_probs)), known


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, per_token_gradient: bool = False) -> Tensor:
    """Return GSPO's ``log s``, the mean of ``ℓ`` over a sequence's tokens, for each token: ``[B, T]``.

    ``s = (π(y) / old(y))^(1/|y|)``, arXiv 2507.18071, eq. 7. With ``per_token_gradient`` it is that of GSPO-token (eq.
    14): the same value, but token t has the gradient of its own ``log π`` only.

    >>> sequence_log_ratio(torch.tensor([[0.1, 0.3, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([[0.2000, 0.2000, 0.2000]])
    """
    check_tokens(log_ratio=log_ratio, mask=mask)
    mean = sequence_mean(log_ratio, mask)
    return mean.detach() + log_ratio - log_ratio.detach() if per_token_gradient else mean


def interpolated_log_probs(log_probs: Tensor, sample_log_probs: Tensor, staleness: Tensor) -> Tensor:
    """Return A-3PO's proximal policy, a constant: ``log prox = log π + (log μ - log π) / d``. No forward pass.

    arXiv 2512.06547: d weight updates lie between μ and π; the proximal policy is one update before π, and log-probs
    are assumed to change evenly. ``d = 0``, for tokens sampled by the weights being trained, is treated as 1: μ is
    then the proximal policy, the centre of the trust region.

    Args:
        log_probs: log π, ``[B, T]``.
        sample_log_probs: log μ, ``[B, T]``.
        staleness: d, integers ``[B, T]``.

    >>> interpolated_log_probs(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, -3.0]]), torch.tensor([[1, 4]]))
    tensor([[-3.0000, -1.5000]])
    """
    check_tokens(log_probs=log_probs, sample_log_probs=sample_log_probs, staleness=staleness)
    current = log_probs.detach()
    return current + (sample_log_probs - current) / staleness.clamp(min=1)


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return ``(Σ r)^2 / (n Σ r^2)`` over the n tokens of ``mask``: 1 if all ratios are equal, ``1/n`` at worst.

    Kish's effective sample size as a share of n, as TorchRL's ``"ESS"``; 0 for an empty mask.

    >>> effective_sample_size(torch.tensor([[1.0, 3.0, 100.0]]).log(), torch.tensor([[True, True, False]]))
    tensor(0.8000)
    """
    check_tokens(log_ratio=log_ratio, mask=mask)
    weights = log_ratio.detach().masked_fill(~mask, float("-inf")).flatten()
    share = (2 * weights.logsumexp(0) - (2 * weights).logsumexp(0)).exp() / mask.sum()
    return torch.where(mask.any(), share, torch.zeros_like(share))


# Weights and masks for the mismatch between two policies; all are constants, which objectives/corrections.py combines.
# ``log_rho`` is ``log ρ = log old - log μ``, ``[B, T]``: how much likelier the sampled token is under the old policy
# than under the one that sampled it. ``ρ(y) = Π ρ`` is the sequence's. Sums and means are over the tokens of ``mask``.


def token_weight(log_rho: Tensor) -> Tensor:
    """Return ``ρ``: the importance weight of each token.

    >>> token_weight(torch.tensor([[0.5, 2.0]]).log())
    tensor([[0.5000, 2.0000]])
    """
    check_tokens(log_rho=log_rho)
    return torch.exp(log_rho.detach())


def sequence_weight(log_rho: Tensor, mask: Tensor) -> Tensor:
    """Return ``ρ(y)``, the product over a sequence's tokens, for each token; its logarithm is clamped to ±20.

    >>> sequence_weight(torch.tensor([[0.5, 3.0, 9.0]]).log(), torch.tensor([[True, True, False]]))
    tensor([[1.5000, 1.5000, 1.5000]])
    """
    check_tokens(log_rho=log_rho, mask=mask)
    return sequence_sum(log_rho.detach(), mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def weight_within(weight: Tensor, low: float, high: float) -> Tensor:
    """Return the tokens (bool) with ``low <= weight <= high``.

    >>> weight_within(torch.tensor([[0.4, 1.0, 6.0]]), 0.5, 5.0)
    tensor([[False,  True, False]])
    """
    check_tokens(weight=weight)
    return (weight >= low) & (weight <= high)


def geometric_mean_within(log_rho: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Return the tokens (bool) of the sequences with ``low <= ρ(y)^(1/|y|) <= high``.

    >>> log_rho, mask = torch.tensor([[0.1, -0.1], [0.1, 0.1]]), torch.ones(2, 2, dtype=torch.bool)
    >>> geometric_mean_within(log_rho, mask, 0.99, 1.01)
    tensor([[ True,  True],
            [False, False]])
    """
    check_tokens(log_rho=log_rho, mask=mask)
    return weight_within(sequence_mean(log_rho.detach(), mask).exp(), low, high)


def k3_mean_below(log_rho: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Return the tokens (bool) of the sequences whose mean ``ρ - 1 - log ρ`` is at most ``limit``.

    The mean estimates ``KL(μ || old)`` (k3). Unlike the geometric mean, it detects differences of either sign.

    >>> log_rho, mask = torch.tensor([[0.1, -0.1], [0.2, -0.2]]), torch.ones(2, 2, dtype=torch.bool)
    >>> k3_mean_below(log_rho, mask, 0.01)
    tensor([[ True,  True],
            [False, False]])
    """
    check_tokens(log_rho=log_rho, mask=mask)
    log_rho = log_rho.detach()
    return sequence_mean(torch.expm1(log_rho) - log_rho, mask) <= limit


def off_policy_negatives(log_ratio: Tensor, advantage: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool) with ``A < 0`` in sequences whose mean ``log μ - log π`` exceeds ``threshold``.

    Off-policy sequence masking drops them: DeepSeek-V3.2, arXiv 2512.02556, eq. 9. ``log_ratio`` is ``log π - log μ``,
    of the policy as it is now.

    >>> advantage, mask = torch.tensor([[-1.0, 1.0]]), torch.tensor([[True, True]])
    >>> off_policy_negatives(torch.tensor([[-0.2, -0.1]]), advantage, mask, 0.1)
    tensor([[ True, False]])
    """
    check_tokens(log_ratio=log_ratio, advantage=advantage, mask=mask)
    return (advantage < 0) & (sequence_mean(-log_ratio.detach(), mask) > threshold)


def staleness_weight(staleness: Tensor) -> Tensor:
    """Return ``1 / max(1, d)``: the more weight updates d ago a token was sampled, the less it counts.

    The step size of staleness-aware SGD (arXiv 1511.05950), token by token.

    >>> staleness_weight(torch.tensor([[0, 1, 4]]))
    tensor([[1.0000, 1.0000, 0.2500]])
    """
    check_tokens(staleness=staleness)
    return 1 / staleness.clamp(min=1)


# Penalties that keep a policy near another one, ``q``: the reference or the rollout policy.
#
# What matters about a penalty is its gradient. It should be that of the reverse KL divergence of each token's
# distribution, ``∇KL(π || q) = E_π[log(π/q) ∇log π]``. With tokens sampled from μ and ``r = π/μ`` (``sg`` stops the
# gradient):
#
# =========  =========================================  =============================================================
# estimator  expected gradient of the plain penalty     off policy, weighted by r
# =========  =========================================  =============================================================
# ``k1``     ``E_μ[∇log π]``: on policy it is 0         ``r k1``: right; of high variance
# ``k2``     ``E_μ[k1 ∇log π]``: right on policy only   ``sg(r) k2``: right
# ``k3``     ``E_μ[(1 - q/π) ∇log π]``: on policy that  ``r k3``: right, since ``∇(r k3) = r k1 ∇log π`` exactly
#            of the *forward* ``KL(q || π)``
# =========  =========================================  =============================================================
#
# arXiv 2510.01555 for the plain penalties; DeepSeek-V3.2 (arXiv 2512.02556, eq. 7) for ``r k3``. The definitions, and
# their values as estimates, are in :mod:`torchrl_moe.ops.divergence`.


KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
"""Estimators of a KL divergence from samples: :func:`~torchrl_moe.ops.k1`, ``k2`` and ``k3``."""
_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(
    log_probs: Tensor,
    other_log_probs: Tensor,
    mask: Tensor,
    estimator: KLEstimator = "k3",
    log_ratio: Tensor | None = None,
    clamp: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return per token an estimate of ``KL(π || q)``, to be used as a loss, and the mask of tokens where it is known.

    Args:
        log_probs: log π, ``[B, T]``, with a gradient.
        other_log_probs: log q, ``[B, T]``.
        mask: ``[B, T]`` bool.
        estimator: ``"k3"`` is GRPO's (arXiv 2402.03300, eq. 4); docs/objectives.md has the gradient of each.
        log_ratio: ``log π - log μ`` of :func:`log_ratio`, ``[B, T]``: weights the penalty, which then has the
            gradient of ``KL(π || q)`` off policy too. ``None``: unweighted.
        clamp: clamps each penalty, its weight included, to ``±clamp``; a clamped penalty has no gradient. k3 grows as
            ``q/π``: a single token to which q gives 4e8 times π's probability would outweigh a whole batch.

    Raises:
        ValueError: a wrong shape, or an unknown estimator.

    >>> kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
    (tensor([[0.1065]]), tensor([[True]]))
    """
    check_tokens(log_probs=log_probs, other_log_probs=other_log_probs, mask=mask)
    _checks.check_choice("estimator", estimator, _ESTIMATORS)
    known = mask & log_probs.isfinite() & other_log_probs.isfinite()
    penalty = _ESTIMATORS[estimator](select(known, log_probs), select(known, other_log_probs))
    if log_ratio is not None:
        check_tokens(log_ratio=log_ratio, mask=mask)
        ratio = torch.exp(select(known, log_ratio))
        penalty = (ratio.detach() if estimator == "k2" else ratio) * penalty
    return penalty if clamp is None else penalty.clamp(-clamp, clamp), known


def kl_reward(log_probs: Tensor, other_log_probs: Tensor, mask: Tensor, coeff: float) -> Tensor:
    """Return per token ``-coeff (log π - log q)``, a constant to be added to the rewards: ``k1`` in the reward.

    The policy gradient of this reward is that of ``-coeff KL(π || q)`` (arXiv 2510.01555). ``log_probs`` are of the
    policy that sampled. For a reward per sequence, sum over the tokens. Tokens whose value is unknown get 0.

    >>> kl_reward(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -9.0]]), torch.tensor([[True, False]]), 0.1)
    tensor([[-0.0500, -0.0000]])
    """
    check_tokens(log_probs=log_probs, other_log_probs=other_log_probs, mask=mask)
    return -coeff * log_ratio(log_probs.detach(), other_log_probs.detach(), mask)[0]


def trust_region(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool) of ``mask`` with ``k2 = (log π - log ref)^2 / 2 <= threshold``.

    The per-token trust region of TorchRL's ``kl_mask_threshold``; k2 is Schulman's estimator, see
    :mod:`torchrl_moe.ops.divergence`. A token whose ``k2`` is unknown is outside.

    >>> log_probs, ref = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]])
    >>> trust_region(log_probs, ref, torch.tensor([[True, True]]), threshold=0.5)
    tensor([[ True, False]])
    """
    check_tokens(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    gap, known = log_ratio(log_probs, ref_log_probs, mask)
    return known & (0.5 * gap.square() <= threshold)  # as in k2


# The policy's loss per token, one function for each paper. Gradients flow through ``ℓ``, or through ``log π``.


Divergence: TypeAlias = Literal["tv", "kl"]
"""What DPPO's trust region bounds: total variation, or KL."""


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float, dual_clip: float | None = None
) -> Tensor:
    """Return per token ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(ℓ)``.

    PPO's clipped surrogate (arXiv 1707.06347, eq. 7), per token as in GRPO (arXiv 2402.03300, eq. 3). ``low`` and
    ``high`` may differ: DAPO's Clip-Higher (arXiv 2503.14476, eq. 10). With ``dual_clip = c`` the ratio of a negative
    advantage counts at most c: the loss is at most ``-c A``, without a gradient beyond that (arXiv 1912.09729).

    >>> ratio, advantage = torch.tensor([[1.5, 1.5, 0.5]]), torch.tensor([[1.0, -1.0, -1.0]])
    >>> clipped_surrogate(ratio.log(), advantage, 0.2, 0.28)
    tensor([[-1.2800,  1.5000,  0.8000]])
    """
    check_tokens(log_ratio=log_ratio, advantage=advantage)
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantage, _clip(ratio, low, high) * advantage)
    if dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)


def outside_clip_range(log_ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Return the tokens (bool) whose ratio lies outside ``[1 - low, 1 + high]``, whatever their advantage.

    Their share is the clip fraction. With a positive advantage only those above, with a negative one only those below
    lose their gradient in :func:`clipped_surrogate` (arXiv 1707.06347, eq. 7).

    >>> outside_clip_range(torch.tensor([[0.5, 1.0, 1.25]]).log(), 0.2, 0.28)
    tensor([[ True, False, False]])
    """
    check_tokens(log_ratio=log_ratio)
    ratio = log_ratio.exp()
    return (ratio < 1 - low) | (ratio > 1 + high)


def cispo_surrogate(
    log_ratio: Tensor, log_probs: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float
) -> Tensor:
    """Return per token ``-sg(clip(r, 1 - low, 1 + high)) A log π``.

    CISPO, arXiv 2506.13585, eq. 4: the clipped weight is a constant (``sg``), so every token keeps a gradient.

    >>> log_probs = torch.tensor([[-1.0, -1.0]])
    >>> cispo_surrogate(torch.tensor([[1.5, 0.5]]).log(), log_probs, torch.tensor([[1.0, -1.0]]), 0.2, 0.28)
    tensor([[ 1.2800, -0.8000]])
    """
    check_tokens(log_ratio=log_ratio, log_probs=log_probs, advantage=advantage)
    return -_clip(log_ratio.detach().exp(), low, high) * advantage * log_probs


def outside_divergence(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantage: Tensor,
    low: Tensor | float,
    high: Tensor | float,
    divergence: Divergence = "tv",
) -> Tensor:
    """Return the tokens (bool) that DPPO blocks: they left the trust region, and their gradient would lead further out.

    With p = π(token) and q = old(token), a token is blocked if ``A > 0, p > q, D > high`` or ``A < 0, p < q, D > low``.
    D compares the distributions over {the token, any other}: ``"tv"`` is ``|p - q|``, ``"kl"`` is ``q log(q / p) + (1 -
    q) log((1 - q) / (1 - p))``. arXiv 2602.04879, the binary approximations of its trust region.

    >>> old, new = torch.tensor([[0.5, 0.5, 0.01]]).log(), torch.tensor([[0.8, 0.6, 0.05]]).log()
    >>> outside_divergence(new, old, torch.ones(1, 3), 0.15, 0.15)
    tensor([[ True, False, False]])
    """
    check_tokens(log_probs=log_probs, old_log_probs=old_log_probs, advantage=advantage)
    log_p, log_q = log_probs.detach(), old_log_probs
    p, q = log_p.exp(), log_q.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        # log(1 - p) and log(1 - q), finite where p or q is 1
        log_p_other = (-torch.expm1(log_p)).clamp(min=1e-7).log()
        log_q_other = (-torch.expm1(log_q)).clamp(min=1e-7).log()
        distance = q * (log_q - log_p) + (1 - q) * (log_q_other - log_p_other)
    return ((advantage > 0) & (p > q) & (distance > high)) | ((advantage < 0) & (p < q) & (distance > low))


def dppo_surrogate(log_ratio: Tensor, advantage: Tensor, blocked: Tensor, max_ratio: float) -> Tensor:
    """Return per token ``-min(r, max_ratio) A``, and 0 for the blocked ones.

    DPPO, arXiv 2602.04879: the surrogate of a ratio that is not clipped, under the mask of :func:`outside_divergence`.
    The cap bounds the weight of a token with an extreme ratio, but keeps its gradient, ``-min(r, max_ratio) A ∇ℓ``.

    >>> ratio, blocked = torch.tensor([[1.5, 50.0, 1.5]]), torch.tensor([[False, False, True]])
    >>> dppo_surrogate(ratio.log(), torch.ones(1, 3), blocked, max_ratio=20.0)
    tensor([[ -1.5000, -20.0000,   0.0000]])
    """
    check_tokens(log_ratio=log_ratio, advantage=advantage, blocked=blocked)
    weight = log_ratio.detach().exp().clamp(max=max_ratio)
    one = (log_ratio - log_ratio.detach()).exp()  # with the gradient of ℓ
    return torch.where(blocked, 0.0, -weight * one * advantage)


def sapo_surrogate(log_ratio: Tensor, advantage: Tensor, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """Return per token ``-(4 / τ) σ(τ (r - 1)) A``, τ ``positive`` where ``A > 0`` and ``negative`` elsewhere.

    SAPO's soft gate, arXiv 2511.20347. On policy its gradient is that of ``-r A``; it decreases as r moves away from 1
    on either side, faster with a larger τ.

    >>> sapo_surrogate(torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]))
    tensor([[-2.0000,  1.9048]])
    """
    check_tokens(log_ratio=log_ratio, advantage=advantage)
    temperature = torch.where(advantage > 0, positive, negative).to(log_ratio.dtype)
    return -4 / temperature * (temperature * (log_ratio.exp() - 1)).sigmoid() * advantage


def _clip(ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return ratio.clamp(torch.as_tensor(1 - low).to(ratio), torch.as_tensor(1 + high).to(ratio))
