"""Corrections for the mismatch between the policy that sampled and the policy being trained, by name.

With ``old = prox`` in the decoupled objective (``proximal_policy`` set) and ``old = π`` in the coupled one, ``ρ = old /
μ`` of a token and ``ρ(y) = Π ρ`` of a sequence, both constants:

====================  ================  ===========================================  ==================================
name                  weight            left out                                     source, default
====================  ================  ===========================================  ==================================
``tis``               min(ρ, C)         nothing                                      Yao et al. 2025, C = 2
``seq_tis``           min(ρ(y), C)      nothing                                      Liu et al. 2025, C = 2
``mis``               ρ                 tokens with ρ > C                            Liu et al. 2025, C = 2
``icepop``            ρ                 tokens with ρ outside [a, b]                 arXiv 2510.18855, [0.5, 5]
``seq_mis``           ρ(y)              sequences with ρ(y) > C                      Liu et al. 2025, C = 2
``geo``               none              sequences, ρ(y)^(1/|y|) outside [a, b]       Liu et al. 2025, [0.999, 1.001]
``k3``                none              sequences, mean of ρ - 1 - log ρ above c     after arXiv 2512.23075, 0.01
``opsm``              none              tokens with A < 0 in sequences with a mean   arXiv 2512.02556, 1e-4
                                        of log μ - log π above δ
``snis``              divided by its    nothing                                      self-normalised importance sampling
                      mean over the
                      batch
``staleness_mask``    none              tokens sampled more than n updates ago       n = 8
``staleness_weight``  1 / max(1, d), d  nothing                                      arXiv 1511.05950
                      updates ago
====================  ================  ===========================================  ==================================

Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", fengyao.notion.site/off-policy-rl.
Liu et al., "When Speed Kills Stability", richardli.xyz/rl-collapse.

Which combinations are allowed:

- **An importance weight needs the decoupled objective.** In the coupled one the surrogate's ratio is π/μ, which
  already contains ``ρ``: a weight would count it twice. (GSPO's is ``(π/μ)^(1/|y|)``, which does not contain ``ρ(y)``;
  but there, too, a weight of π/μ would change with each update.) ``tis``, ``seq_tis`` and ``snis`` are refused;
  ``mis``, ``icepop`` and ``seq_mis`` only mask, and keep their meaning, since the ratio is their weight.
- **A mask of tokens needs a ratio of tokens.** ``mis``, ``icepop`` and ``staleness_mask`` are refused with
  ``GSPOLoss(level="sequence")``.
- **One importance weight.** ``tis``, ``mis`` and ``icepop`` share ``ρ``, ``seq_tis`` and ``seq_mis`` share ``ρ(y)``:
  within a set they combine freely. In the decoupled objective, one of each set together is refused, because ``ρ`` is a
  factor of ``ρ(y)``.
- ``snis`` needs one of those weights, and not the interpolated proximal policy, whose weights depend on π:
  their mean over a batch is unknown until every part has been through the model.
- ``geo``, ``k3``, ``opsm`` and ``staleness_weight`` combine with everything.

A masked token contributes 0 to every loss term, but still counts in the denominator, which depends on the data alone
and is the same however a batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torchrl_moe._checks import check_number, shown
from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.batch import TokenBatch
from torchrl_moe.objectives.functional import select

# The decoupled objective (arXiv 2110.00641; for language models arXiv 2505.24298) centres the trust region on a
# proximal policy, and corrects for the policy that sampled by a weight: ``(prox/μ) min(r A, clip(r) A)`` with ``r =
# π/prox``. The proximal policy is recomputed at the start of a step, or interpolated without a forward pass.


Proximal: TypeAlias = Literal["recomputed", "interpolated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRatios:
    """Log-ratios, ``[B, T]`` each; 0 outside their mask. ``old`` is the proximal policy, or μ if there is none."""

    log_probs: Tensor
    """log π, with its gradient."""
    old_log_probs: Tensor
    """log old, a constant."""
    log_ratio: Tensor
    """log π - log old: the argument of a surrogate."""
    sample_log_ratio: Tensor
    """log π - log μ."""
    mask: Tensor
    """bool: the tokens of the batch whose log-probs are all finite."""
    log_rho: Tensor
    """log old - log μ, or log π - log μ without a proximal policy: the mismatch to correct, a constant."""
    rho_mask: Tensor
    """bool: the tokens where the mismatch is known. With a recomputed proximal policy it does not depend on π."""

    @property
    def uncut_gradient(self) -> Tensor:
        """:attr:`log_ratio`, with the gradient of log π also where it is cut to ±20; for losses that bound ratios."""
        return self.log_ratio.detach() + self.log_probs - self.log_probs.detach()


def policy_ratios(log_probs: Tensor, batch: TokenBatch, proximal: Proximal | None) -> PolicyRatios:
    """Compare the actor's ``log_probs`` ``[B, T]`` with the policies in ``batch``."""
    sampled, known = F.log_ratio(log_probs, batch.sample_log_probs, batch.mask)
    if proximal is None:
        old, log_ratio, mask = batch.sample_log_probs, sampled, known
        log_rho, rho_mask = sampled.detach(), known
    else:
        if proximal == "interpolated":
            assert batch.staleness is not None
            old = F.interpolated_log_probs(log_probs, batch.sample_log_probs, batch.staleness)
        else:
            assert batch.prox_log_probs is not None
            old = batch.prox_log_probs
        log_ratio, mask = F.log_ratio(log_probs, old, known)
        log_rho, rho_mask = F.log_ratio(old, batch.sample_log_probs, batch.mask)
    return PolicyRatios(
        log_probs=select(mask, log_probs),
        old_log_probs=select(mask, old),
        log_ratio=log_ratio,
        sample_log_ratio=sampled,
        mask=mask,
        log_rho=log_rho,
        rho_mask=rho_mask,
    )


Correction: TypeAlias = Literal[
    "tis",
    "seq_tis",
    "mis",
    "icepop",
    "seq_mis",
    "geo",
    "k3",
    "opsm",
    "snis",
    "staleness_mask",
    "staleness_weight",
]
"""Corrections by name; docs/objectives.md says what each does."""

_TOKEN, _SEQUENCE = ("tis", "mis", "icepop"), ("seq_tis", "seq_mis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of the corrections, by name.

    Raises:
        ValueError: a threshold is negative, or a pair is not in order.

    >>> Thresholds(tis=3.0).icepop
    (0.5, 5.0)
    """

    tis: float = 2.0
    seq_tis: float = 2.0
    mis: float = 2.0
    icepop: tuple[float, float] = (0.5, 5.0)
    seq_mis: float = 2.0
    geo: tuple[float, float] = (0.999, 1.001)
    k3: float = 0.01
    opsm: float = 1e-4
    staleness_mask: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_pair = isinstance(field.default, tuple)
            if is_pair and not (isinstance(value, tuple | list) and len(value) == 2):
                raise ValueError(f"threshold {field.name} must be (low, high), got {shown(value)}.")
            for one in value if is_pair else (value,):
                check_number(f"threshold {field.name}", one, 0, whole=field.name == "staleness_mask", infinite=True)
            if is_pair and not value[0] < value[1]:
                raise ValueError(f"threshold {field.name} must be (low, high) with 0 <= low < high, got {value!r}.")


class Corrections:
    """A set of corrections that can be combined."""

    def __init__(
        self,
        names: Correction | Sequence[Correction] | None,
        thresholds: Thresholds | None = None,
        proximal: Proximal | None = None,
    ) -> None:
        if not isinstance(names, str | list | tuple | None):
            raise ValueError(
                f"correction must be of {list(get_args(Correction))}, or a list of them, got {shown(names)}."
            )
        if not isinstance(thresholds, Thresholds | None):
            raise ValueError(f"thresholds must be Thresholds, or None, got {shown(thresholds)}.")
        self.names: tuple[str, ...] = (names,) if isinstance(names, str) else tuple(names or ())
        self.thresholds = thresholds or Thresholds()
        _check_names(self.names, proximal)
        # The importance weight of the surrogate; the coupled objective's ratio contains it already.
        self._weighs = proximal is not None and bool({*_TOKEN, *_SEQUENCE} & {*self.names})
        self.needs_staleness = bool({"staleness_mask", "staleness_weight"} & {*self.names})
        self.normalises = "snis" in self.names  # by the mean weight of the whole batch

    def __bool__(self) -> bool:
        return bool(self.names)

    def importance_weight(self, log_rho: Tensor, mask: Tensor) -> Tensor:
        """Return the importance weights of the tokens of ``mask``, ``[B, T]``: 1 without a weight, 0 outside."""
        weight = torch.ones_like(log_rho)
        if self._weighs:
            by_sequence = {*_SEQUENCE} & {*self.names}
            weight = F.sequence_weight(log_rho, mask) if by_sequence else F.token_weight(log_rho)
        limits = self.thresholds
        if "tis" in self.names:
            weight = weight.clamp(max=limits.tis)
        if "seq_tis" in self.names:
            weight = weight.clamp(max=limits.seq_tis)
        return select(mask & self._within(log_rho, mask), weight)

    def __call__(
        self, ratios: PolicyRatios, advantage: Tensor, staleness: Tensor | None, mean_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the weight of each token, and the tokens (bool) that are kept; both are constants ``[B, T]``."""
        log_rho, mask, limits = ratios.log_rho, ratios.rho_mask, self.thresholds
        weight = self.importance_weight(log_rho, mask)
        kept = self._within(log_rho, mask)
        if mean_weight is not None:
            weight = weight / torch.where(mean_weight > 0, mean_weight, 1.0).to(weight)
        if "geo" in self.names:
            kept = kept & F.geometric_mean_within(log_rho, mask, *limits.geo)
        if "k3" in self.names:
            kept = kept & F.k3_mean_below(log_rho, mask, limits.k3)
        if "opsm" in self.names:
            kept = kept & ~F.off_policy_negatives(ratios.sample_log_ratio, advantage, ratios.mask, limits.opsm)
        if staleness is not None and "staleness_weight" in self.names:
            weight = weight * F.staleness_weight(staleness)
        if staleness is not None and "staleness_mask" in self.names:
            kept = kept & (staleness <= limits.staleness_mask)
        return weight, kept

    def _within(self, log_rho: Tensor, mask: Tensor) -> Tensor:
        """The tokens (bool) whose ``ρ``, or whose sequence's, is inside the bounds of mis, icepop and seq_mis."""
        limits, kept = self.thresholds, torch.ones_like(mask)
        if "mis" in self.names:
            kept = kept & F.weight_within(F.token_weight(log_rho), 0.0, limits.mis)
        if "icepop" in self.names:
            kept = kept & F.weight_within(F.token_weight(log_rho), *limits.icepop)
        if "seq_mis" in self.names:
            kept = kept & F.weight_within(F.sequence_weight(log_rho, mask), 0.0, limits.seq_mis)
        return kept


def _check_names(names: tuple[str, ...], proximal: Proximal | None) -> None:
    allowed = get_args(Correction)
    for name in names:
        if name not in allowed:
            raise ValueError(f"correction must be of {list(allowed)}, one name or a list of them, got {name!r}.")
    if len(set(names)) < len(names):
        raise ValueError(f"correction lists a name twice, got {list(names)}.")
    token, sequence = ([name for name in names if name in group] for group in (_TOKEN, _SEQUENCE))
    weights_only = [name for name in names if name in ("tis", "seq_tis", "snis")]
    if proximal is None and weights_only:
        raise ValueError(
            f"correction={weights_only[0]!r} is an importance weight, and the ratio of the coupled objective corrects "
            "for the same policies: π/μ, which holds ρ, or its mean over a sequence in GSPOLoss. A weight of π/μ on "
            "top would move with each update. Set proximal_policy, so that the weight is prox/μ; or use a mask: mis, "
            "icepop, seq_mis, geo, k3 or opsm."
        )
    if proximal is not None and token and sequence:
        raise ValueError(
            f"correction={list(names)} has two importance weights, of tokens ({', '.join(token)}) and of sequences "
            f"({', '.join(sequence)}): the first is a factor of the second and would count twice. geo and k3 are masks "
            "of sequences that go with a weight of tokens."
        )
    if "snis" in names and not (token or sequence):
        raise ValueError(f"correction 'snis' normalises an importance weight, got {list(names)}: add tis, for example.")
    if "snis" in names and proximal == "interpolated":
        raise ValueError(
            "correction 'snis' needs the mean weight of the whole batch, and with proximal_policy='interpolated' "
            "weights depend on the policy being trained: use 'recomputed', or leave 'snis' out."
        )
