"""``RolloutScores``: a batch's mismatch, proximal and reference log-probs, before the first update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.objectives.mismatch import CollapseThresholds, MismatchMetrics
from torchrl_moe.trainers.micro_batches import micro_batches_of_ranks
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.token_stepper import lengths_of

__all__ = ["RolloutScores"]

PROX_KEY, REFERENCE_KEY = "prox", "ref_log_probs"
MISMATCH_COLUMNS = {
    "mismatch_kl": "k3",
    "dlogp_mean": "dlogp_mean",
    "dlogp_max": "dlogp_max",
    "extreme_fraction": "extreme_fraction",
}
"""Column of a run's record -> metric of :class:`~torchrl_moe.objectives.MismatchMetrics`."""


class RolloutScores:
    """Scores rollouts by the current policy, and by the reference.

    Under R2 this is the forward pass that records the experts. If nothing needs the policy's scores, and no mismatch is
    due, there is no forward pass. With several ranks each scores its own share; metrics are of all ranks.

    Args:
        actor: the policy.
        loss: what reads the results; its keys are set.
        reference: writes ``("ref_log_probs", "full")``; ``None``: the loss needs none, or scores the reference itself.
        max_tokens: of a micro-batch, pads included.
        precision: makes the context of a forward pass.
        placement: the ranks that share the model; default: one.
    """

    def __init__(
        self,
        actor: TransformersWrapper,
        loss: GRPOLoss,
        reference: Callable[[TensorDictBase], TensorDictBase] | None,
        *,
        max_tokens: int | None,
        precision: Callable[[], AbstractContextManager[Any]],
        placement: Placement | None = None,
    ) -> None:
        self._placement = placement or Placement()
        self.actor, self.loss, self.reference = actor, loss, reference
        self.max_tokens, self.precision = max_tokens, precision
        self.writes_prox = loss.proximal_policy == "recomputed"
        # one for the whole run: it remembers that it has warned
        self._watch = _metrics(CollapseThresholds() if self._placement.ranks.is_first else None)
        # under R2 a second forward pass would record again: it gets a copy of the batch
        self.scorer = actor.get_new_version(measure_agreement=actor.replay == "R3")
        self.live = actor.get_new_version(replay="none") if actor.replay == "R3" else None
        if self.writes_prox:
            loss.set_keys(prox_log_prob=(PROX_KEY, "full"))
        if reference is not None:
            loss.set_keys(ref_log_probs=(REFERENCE_KEY, "full"))

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase, version: int, with_mismatch: bool) -> dict[str, float]:
        """Score a batch, in place; return the mismatch between trainer and engine, if requested.

        Args:
            batch: ``[B]``, as collected.
            version: of the weights.
            with_mismatch: whether to measure the mismatch, with replay and without.
        """
        found = _Found()
        scores = with_mismatch or self.writes_prox or self.actor.replay == "R2"
        for part, counts in self._parts(batch) if scores else ():
            with self.precision():
                log_probs, spread, _ = self.scorer.score(part, entropy=with_mismatch)
            if self.writes_prox:
                self._write(part, log_probs)
            if not with_mismatch:
                continue
            unaided = None
            if self.live is not None:
                with self.precision():
                    unaided = self.live.score(part.copy(), entropy=False)[0]
            if counts:
                assert spread is not None
                found.add(part, version, log_probs, spread, unaided)
        if self.reference is not None:  # last: it follows the experts that R2 has recorded by now
            for part, _ in self._parts(batch):
                with self.precision():
                    self.reference(part)
        return _Found.of(self._placement.gather(found)).columns(self._watch) if with_mismatch else {}

    def _parts(self, batch: TensorDictBase) -> Iterator[tuple[TensorDictBase, bool]]:
        """Yield micro-batches, and whether they count: copies that do not give all ranks as many passes."""
        lengths = lengths_of(batch)
        for part in micro_batches_of_ranks(lengths, self.max_tokens, self._placement.ranks):
            shortest = min(range(len(lengths)), key=lambda i: lengths[i])
            yield (batch[part], True) if part else (batch[[shortest]].clone(), False)

    @staticmethod
    def _write(part: TensorDictBase, log_probs: torch.Tensor) -> None:
        """Give each sample its row, without the padding on the left."""
        for sample, row in zip(part.unbind(0), log_probs, strict=True):
            sample.set((PROX_KEY, "full"), row[len(row) - len(sample.get(("tokens", "full"))) :].cpu())


class _Found:
    """Metrics of a batch, to be combined over all ranks."""

    def __init__(self) -> None:
        self.metrics, self.live = _metrics(), _metrics()
        self.entropy = self.tokens = 0.0

    def add(
        self,
        part: TensorDictBase,
        version: int,
        log_probs: torch.Tensor,
        spread: torch.Tensor,
        unaided: torch.Tensor | None,
    ) -> None:
        """Add a micro-batch: its scores, entropies, and scores by the live router."""
        self.metrics.update(part, log_probs, version=version)
        known = _sampled(part, log_probs)
        self.entropy += float(spread[known].sum())
        self.tokens += float(known.sum())
        if unaided is not None:
            self.live.update(part, unaided)

    @classmethod
    def of(cls, every: Sequence[_Found]) -> _Found:
        """Combine the metrics of all ranks."""
        first, *others = every
        for other in others:
            first.metrics.merge(other.metrics)
            first.live.merge(other.live)
            first.entropy, first.tokens = first.entropy + other.entropy, first.tokens + other.tokens
        return first

    def columns(self, watch: MismatchMetrics) -> dict[str, float]:
        """Return the columns of a run's record; ``watch`` warns of a mismatch that was not there in the last batch."""
        watch.reset()
        watch.merge(self.metrics)
        found, unaided = watch.compute(), self.live.compute()
        columns = {
            name: found[f"mismatch/{metric}"]
            for name, metric in MISMATCH_COLUMNS.items()
            if f"mismatch/{metric}" in found
        }
        if "mismatch/dlogp_mean" in unaided:
            columns["dlogp_live"] = unaided["mismatch/dlogp_mean"]
        if "routing/agreement" in found:
            columns["agreement"] = found["routing/agreement"]
        return {**columns, "entropy": self.entropy / max(self.tokens, 1.0)}


def _metrics(thresholds: CollapseThresholds | None = None) -> MismatchMetrics:
    return MismatchMetrics(sample_size=1, thresholds=thresholds)  # no percentile is needed


def _sampled(part: TensorDictBase, log_probs: torch.Tensor) -> torch.Tensor:
    sampled = part.get(("log_probs", "full"), as_padded_tensor=True, padding_side="left", padding_value=torch.nan)
    return sampled.isfinite().to(log_probs.device)
