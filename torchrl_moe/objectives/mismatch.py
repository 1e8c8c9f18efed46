"""``MismatchMetrics``: how far trainer and rollout engine are apart on the tokens that the engine sampled."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_moe import _checks
from torchrl_moe.objectives.batch import Masking, TokenReader
from torchrl_moe.ops.divergence import extreme_fraction, k1, k3, masked_mean
from torchrl_moe.render.tables import html_table, number_text

logger = logging.getLogger(__name__)

SHOWN = ("k3", "dlogp_mean", "extreme_fraction", "ess")
SHOWN_METRICS = 64

Sums = defaultdict[str, float]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollapseThresholds:
    """Thresholds beyond which a run is likely to collapse; ``None`` switches one off."""

    k3: float | None = 0.01
    """Greatest mean k3. A healthy 30B MoE has 1.5e-3, or half of that with replay (arXiv 2510.11370)."""
    extreme_fraction: float | None = 0.1
    """Greatest F(τ); the default is for τ = 2: more than this came before a collapse (arXiv 2510.11370)."""
    ess: float | None = 0.5
    """Least effective sample size: below 0.5, half of the tokens of a batch are wasted."""
    dropped_fraction: float | None = 0.0
    """Greatest share of tokens with a log-prob that is NaN or infinite."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _checks.check_number(name, value, 0, none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchKeys:
    """The keys of the entries."""

    tokens: NestedKey = ("tokens", "full")
    sample_log_prob: NestedKey = ("log_probs", "full")
    prompt: NestedKey = ("tokens", "prompt")
    attention_mask: NestedKey = ("masks", "all_attention_mask")
    assistant_mask: NestedKey = ("masks", "all_assistant_mask")
    policy_versions: NestedKey = ("policy_versions", "full")
    agreement: NestedKey = ("routing", "agreement")
    fallback: NestedKey = ("routing", "fallback")


class MismatchMetrics:
    """Accumulates the mismatch over micro-batches and computes metrics over all of them.

    π is the trainer, μ the engine that sampled, ``ℓ = log π - log μ`` of a sampled token, clamped to ±20, ``r =
    exp(ℓ)``. A token counts if ``masking_strategy`` selects it and its ``log μ`` is finite, whether or not a correction
    masks it later. Sums and counts are kept, in float64, so micro-batches and ranks add up without bias.

    ==============================  ====================================================================================
    ``mismatch/tokens``             n, the number of tokens that count and whose ``log π`` is finite
    ``mismatch/k1``, ``k3``         means of ``-ℓ`` and ``r - 1 - ℓ``: both estimate ``KL(μ || π)``
    ``mismatch/dlogp_mean``,        mean and maximum of ``|ℓ|``
    ``dlogp_max``
    ``mismatch/dlogp_p99``          its 99th percentile, of a uniform sample of ``p99_tokens`` tokens: all, until there
                                    are more than ``sample_size``
    ``mismatch/ppl_ratio``          mean over sequences of ``exp(mean -ℓ)``: perplexity by π over that by μ
    ``mismatch/chi2``               ``mean r^2 - 1``, estimates ``χ²(π || μ)``
    ``mismatch/ess``                ``(Σ r)^2 / (n Σ r^2)``, effective sample size
    ``mismatch/extreme_fraction``   F(τ): share of tokens with ``max(r, 1 / r) > τ`` (arXiv 2510.11370)
    ``mismatch/dropped_fraction``   share of tokens whose ``log π`` is NaN or infinite, or whose ``log μ`` is unless the
                                    strategy is ``"generic"``: they are in no other metric
    ``mismatch/masked_fraction``,   share of tokens, and of sequences as a whole, that ``kept`` leaves out
    ``masked_sequence_fraction``
    ``mismatch/age_mean``           mean of ``version`` less the version that sampled the token
    ``mismatch/age_A/...``          ``tokens``, ``k3``, ``dlogp_mean`` of tokens of age A; the last A is "or older"
    ``routing/agreement``,          share of rows in which the live router chooses the experts that were replayed; mean
    ``agreement/layer_N``           over layers, and of each
    ``routing/fallback_fraction``   share of rows that ran on live routing because no experts were known
    ==============================  ====================================================================================

    A metric without input is absent.

    Args:
        masking_strategy: ``"sft"``, ``"rlhf"`` or ``"generic"``, see :class:`~torchrl_moe.objectives.GRPOLoss`.
        tau: τ of F(τ).
        max_age: this age and all greater ones form one group.
        sample_size: greatest number of log-ratios kept, for the percentile and for :attr:`log_ratios`.
        thresholds: beyond which :meth:`compute` warns; ``None``: no warnings.
        keys: of the entries.

    Example::

        metrics = MismatchMetrics()
        for part in td.split(4):
            log_probs, _, _ = scorer.score(part)
            metrics.update(part, log_probs, version=sender.version)
        logger.log_metrics(metrics.compute())
    """

    def __init__(
        self,
        *,
        masking_strategy: Masking = "sft",
        tau: float = 2.0,
        max_age: int = 8,
        sample_size: int = 1 << 16,
        thresholds: CollapseThresholds | None = CollapseThresholds(),
        keys: MismatchKeys = MismatchKeys(),
    ) -> None:
        _checks.check_choice("masking_strategy", masking_strategy, get_args(Masking))
        _checks.check_number("tau", tau, above=1, hint="It bounds a ratio that is 1 without mismatch.")
        for name, count in {"max_age": max_age, "sample_size": sample_size}.items():
            _checks.check_number(name, count, 1, whole=True)
        for name, given, kind in (("thresholds", thresholds, CollapseThresholds | None), ("keys", keys, MismatchKeys)):
            if not isinstance(given, kind):
                raise ValueError(f"{name} must be {kind}, got {_checks.shown(given)}.")
        self.masking_strategy, self.tau, self.max_age = masking_strategy, tau, max_age
        self.sample_size, self.thresholds, self.keys = sample_size, thresholds, keys
        self._warned = False
        self.reset()

    def reset(self) -> None:
        """Discard all micro-batches, but not whether a warning was given."""
        self._sums = Sums(float)
        self._ages: dict[int, Sums] = {}
        self._layers: dict[int, Sums] = {}
        self._max = 0.0
        self._sample = UniformSample(self.sample_size)

    @property
    def log_ratios(self) -> Values:
        """float64 ``[m]``: ℓ of a uniform sample of the tokens, for a histogram."""
        return self._sample.values

    @torch.no_grad()
    def update(
        self, tensordict: TensorDictBase, log_probs: Tensor, *, kept: Tensor | None = None, version: int | None = None
    ) -> None:
        """Add a micro-batch.

        Args:
            tensordict: batch size ``[B]``, ragged (a lazy stack) or dense; read, not written.
            log_probs: of the trainer, ``[B, T]``, padded on the left, as ``score`` returns them.
            kept: bool ``[B, T]``, tokens that a correction leaves in the loss.
            version: of the weights that ``log_probs`` were computed with; needed for the ages of tokens.

        Raises:
            ValueError: an entry is missing or does not fit the tokens, or a token is newer than ``version``; nothing of
                the micro-batch is then kept.
        """
        _checks.check_number("version", version, 0, whole=True, none=True)
        batch = copy.copy(self)  # of its own sums: what is refused on the way leaves nothing in ours
        batch.reset()
        batch._add(tensordict, log_probs, kept, version)
        self.merge(batch)

    def _add(self, tensordict: TensorDictBase, log_probs: Tensor, kept: Tensor | None, version: int | None) -> None:
        keys = self.keys
        reader = TokenReader(tensordict, keys.tokens)
        sampled = reader.per_token(keys.sample_log_prob, "the log-probs of the engine that sampled the tokens")
        _checks.check_floating(repr(keys.sample_log_prob), sampled)
        sampled = sampled.cpu().double()
        trained = log_probs.detach().cpu().double()
        _checks.check_same_shape({"log_probs": trained, repr(keys.sample_log_prob): sampled})
        mask = reader.mask(self.masking_strategy, keys.prompt, keys.attention_mask, keys.assistant_mask).cpu()
        if self.masking_strategy == "generic":  # it also selects prompts, which were not sampled
            mask = mask & sampled.isfinite()
        known = mask & sampled.isfinite() & trained.isfinite()
        sums = self._sums
        sums["dropped"] += int((mask & ~known).sum())
        if known.any():
            self._add_tokens(trained, sampled, known)
        if kept is not None:
            _checks.check_same_shape({"kept": kept, repr(keys.sample_log_prob): sampled})
            masked = known & ~_checks.as_mask("kept", kept).cpu()
            sums["offered"] += int(known.sum())
            sums["masked"] += int(masked.sum())
            sums["offered_sequences"] += int(known.any(-1).sum())
            sums["masked_sequences"] += int((known.any(-1) & (masked == known).all(-1)).sum())
        if version is not None:
            versions = reader.per_token(keys.policy_versions, "the version that sampled each token (version=...)", -1)
            self._add_ages(trained, sampled, known, versions.cpu(), version)
        self._add_routing(tensordict, reader)

    def _add_tokens(self, trained: Tensor, sampled: Tensor, known: Tensor) -> None:
        size, p, q = int(known.sum()), sampled[known], trained[known]
        gap = -k1(p, q)
        ratio = gap.exp()
        values = {"k1": -gap, "k3": k3(p, q), "size": gap.abs(), "ratio": ratio, "square": ratio.square()}
        for name, value in values.items():
            self._sums[name] += value.sum().item()
        self._sums["tokens"] += size
        self._sums["extreme"] += extreme_fraction(gap, torch.ones_like(gap, dtype=torch.bool), self.tau).item() * size
        self._max = max(self._max, gap.abs().max().item())
        self._sample.add(gap.numpy())
        per_sequence = masked_mean(k1(sampled, trained), known, known.sum(-1), dim=-1)[known.any(-1)]
        self._sums["ppl"] += per_sequence.exp().sum().item()
        self._sums["sequences"] += len(per_sequence)

    def _add_ages(self, trained: Tensor, sampled: Tensor, known: Tensor, versions: Tensor, version: int) -> None:
        known = known & (versions >= 0)
        age = version - versions[known].long()
        if (age < 0).any():
            raise ValueError(
                f"version={version}, but tokens were sampled by version {int(versions[known].max())}: give the version "
                "of the weights that log_probs were computed with."
            )
        self._sums["aged"] += len(age)
        self._sums["age"] += int(age.sum())
        p, q = sampled[known], trained[known]
        for group in age.clamp(max=self.max_age).unique().tolist():
            at, sums = age.clamp(max=self.max_age) == group, self._ages.setdefault(group, Sums(float))
            sums["tokens"] += int(at.sum())
            sums["k3"] += k3(p[at], q[at]).sum().item()
            sums["dlogp_mean"] += k1(p[at], q[at]).abs().sum().item()

    def _add_routing(self, tensordict: TensorDictBase, reader: TokenReader) -> None:
        """Add the routing metrics of each sample, weighted by its rows."""
        fallback: Tensor | None = tensordict.get(self.keys.fallback, None)
        if fallback is None:
            return
        attended = reader.per_token_mask(self.keys.attention_mask, "the attention mask").cpu().sum(-1)
        _checks.check_shape(repr(self.keys.fallback), fallback.shape, (len(attended),))
        if not bool(((fallback.cpu() >= 0) & (fallback.cpu() <= attended)).all()):
            raise ValueError(
                f"{self.keys.fallback!r} must be from 0 to the sample's tokens, {attended.tolist()}, got "
                f"{fallback.tolist()}."
            )
        replayed = attended - fallback.cpu()
        self._sums["rows"] += int(attended.sum())
        self._sums["fallback"] += int(fallback.sum())
        agreement: Tensor | None = tensordict.get(self.keys.agreement, None)
        if agreement is None:
            return
        _checks.check_shape(repr(self.keys.agreement), agreement.shape, (len(attended), "L"))
        for layer, column in enumerate(agreement.cpu().double().unbind(-1)):
            at = column.isfinite() & (replayed > 0)
            if at.any():
                sums = self._layers.setdefault(layer, Sums(float))
                sums["rows"] += int(replayed[at].sum())
                sums["agreeing"] += (column * replayed)[at].sum().item()

    def merge(self, other: MismatchMetrics) -> None:
        """Add what another instance with the same arguments has collected, such as another rank's.

        Raises:
            ValueError: ``other`` counts other tokens, or has another ``tau`` or ``max_age``.
        """
        _checks.check_instance("other", other, MismatchMetrics)
        for name in ("masking_strategy", "tau", "max_age"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"only metrics with the same arguments can be merged, got {name}={getattr(self, name)!r} and "
                    f"{getattr(other, name)!r}."
                )
        pairs = [(self._sums, other._sums)]
        for mine, theirs in ((self._ages, other._ages), (self._layers, other._layers)):
            pairs += [(mine.setdefault(group, Sums(float)), sums) for group, sums in theirs.items()]
        for total, sums in pairs:
            for name, value in sums.items():
                total[name] += value
        self._max = max(self._max, other._max)
        self._sample.merge(other._sample)

    def compute(self) -> dict[str, float]:
        """Return all metrics; when a threshold is crossed, log one warning, and no other until none is crossed."""
        found = self._metrics()
        crossed = self._crossed(found)
        if crossed and not self._warned:
            words = ", ".join(f"{name} {found[f'mismatch/{name}']:.3g} ({limit})" for name, limit in crossed.items())
            logger.warning("trainer and rollout engine are far apart, the run may collapse: %s", words)
        self._warned = bool(crossed)
        return found

    def __repr__(self) -> str:
        found = self._metrics()
        shown = [f"{name}={found[f'mismatch/{name}']:.3g}" for name in SHOWN if f"mismatch/{name}" in found]
        tokens = f"{found['mismatch/tokens']:.0f} tokens"
        return f"MismatchMetrics({', '.join([tokens, *shown])})"

    def _repr_html_(self) -> str:
        """Return all metrics as a table, without a warning."""
        found = self._metrics()
        crossed = self._crossed(found)
        rows = [
            (name, number_text(value), crossed.get(name.removeprefix("mismatch/"), ""))
            for name, value in list(found.items())[:SHOWN_METRICS]
        ]
        hidden = len(found) - len(rows)
        note = f"and {hidden} more metrics: compute()" if hidden else ""
        return html_table(repr(self), ("metric", "value", "beyond the threshold"), rows, note=note)

    def _metrics(self) -> dict[str, float]:
        sums, n = self._sums, self._sums["tokens"]
        found = {"tokens": n}
        if n + sums["dropped"]:
            found["dropped_fraction"] = sums["dropped"] / (n + sums["dropped"])
        if sums["offered"]:
            found["masked_fraction"] = sums["masked"] / sums["offered"]
            found["masked_sequence_fraction"] = sums["masked_sequences"] / sums["offered_sequences"]
        if n:
            found |= {
                "dlogp_mean": sums["size"] / n,
                "dlogp_max": self._max,
                "dlogp_p99": float(np.quantile(abs(self.log_ratios), 0.99)),
                "p99_tokens": float(len(self.log_ratios)),
                "k1": sums["k1"] / n,
                "k3": sums["k3"] / n,
                "ppl_ratio": sums["ppl"] / sums["sequences"],
                "chi2": sums["square"] / n - 1,
                "ess": sums["ratio"] ** 2 / (n * sums["square"]),
                "extreme_fraction": sums["extreme"] / n,
            }
        if sums["aged"]:
            found["age_mean"] = sums["age"] / sums["aged"]
        for age, group in sorted(self._ages.items()):
            found[f"age_{age}/tokens"] = group["tokens"]
            found |= {f"age_{age}/{name}": group[name] / group["tokens"] for name in ("k3", "dlogp_mean")}
        found = {f"mismatch/{name}": value for name, value in found.items()}
        if sums["rows"]:
            found["routing/fallback_fraction"] = sums["fallback"] / sums["rows"]
        layers = {layer: group["agreeing"] / group["rows"] for layer, group in sorted(self._layers.items())}
        if layers:
            found["routing/agreement"] = sum(layers.values()) / len(layers)
        return found | {f"routing/agreement/layer_{layer}": share for layer, share in layers.items()}

    def _crossed(self, found: Mapping[str, float]) -> dict[str, str]:
        """Return the crossed thresholds as text, by the name of the metric."""
        crossed = {}
        for name, limit in asdict(self.thresholds).items() if self.thresholds else ():
            value = found.get(f"mismatch/{name}")
            if limit is not None and value is not None and (value < limit if name == "ess" else value > limit):
                crossed[name] = f"{'least' if name == 'ess' else 'most'} {limit:g}"
        return crossed


class UniformSample:
    """Keeps up to ``capacity`` numbers of a stream; every subset of that size is equally likely.

    Each number draws a random priority, and the numbers with the lowest priorities are kept, so merging two samples
    gives a sample of the joined streams. Up to ``capacity`` numbers, all are kept. It has its own random generator.

    >>> sample = UniformSample(capacity=100)
    >>> sample.add(np.arange(50))
    >>> len(sample), float(np.quantile(sample.values, 0.5))
    (50, 24.5)
    """

    def __init__(self, capacity: int = 1 << 16, seed: int | None = None) -> None:
        _checks.check_number("capacity", capacity, 1, whole=True)
        self.capacity = capacity
        self.values: Values = np.empty(0)
        """float64 ``[n]``, in no order."""
        self._random = np.random.default_rng(seed)
        self._priorities: Values = np.empty(0)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, values: npt.ArrayLike) -> None:
        """Add numbers, of any shape."""
        flat = np.asarray(values, dtype=np.float64).reshape(-1)
        self._keep(flat, self._random.random(len(flat)))

    def merge(self, other: UniformSample) -> None:
        """Add the numbers of another sample, of another stream."""
        self._keep(other.values, other._priorities)

    def _keep(self, values: Values, priorities: Values) -> None:
        self.values = np.concatenate([self.values, values])
        self._priorities = np.concatenate([self._priorities, priorities])
        if len(self.values) > self.capacity:
            least = np.argpartition(self._priorities, self.capacity)[: self.capacity]
            self.values, self._priorities = self.values[least], self._priorities[least]
