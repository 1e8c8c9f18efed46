"""``RolloutScores``: a batch's mismatch, proximal and reference log-probs, before the first update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.objectives.mismatch import MismatchMetrics
from torchrl_moe.trainers.micro_batches import micro_batches
from torchrl_moe.trainers.token_stepper import lengths_of

__all__ = ["RolloutScores"]

PROX_KEY, REFERENCE_KEY = "prox", "ref_log_probs"
FIGURES = {"kl": "k3", "dlogp_mean": "dlogp_mean", "dlogp_max": "dlogp_max", "extreme_fraction": "extreme_fraction"}
"""Column of a run's record -> figure of :class:`~torchrl_moe.objectives.MismatchMetrics`."""


class RolloutScores:
    """Scores rollouts by the policy as it is, and by the reference.

    Under R2 this is the forward pass that records the experts. Where nothing asks for the policy's scores, and no
    mismatch is due, there is no forward pass.

    Args:
        actor: the policy.
        loss: what reads the results; its keys are set.
        reference: writes ``("ref_log_probs", "full")``; ``None``: the loss asks for none, or scores it by itself.
        max_tokens: of a micro-batch, pads included.
        precision: makes the context of a forward pass.
    """

    def __init__(
        self,
        actor: TransformersWrapper,
        loss: GRPOLoss,
        reference: Callable[[TensorDictBase], TensorDictBase] | None,
        *,
        max_tokens: int | None,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.actor, self.loss, self.reference = actor, loss, reference
        self.max_tokens, self.precision = max_tokens, precision
        self.writes_prox = loss.proximal_policy == "recomputed"
        # under R2 both forward passes of a batch would record: a batch goes through again only as a copy
        self.scorer = actor.get_new_version(measure_agreement=actor.replay == "R3")
        self.live = actor.get_new_version(replay="none") if actor.replay == "R3" else None
        if self.writes_prox:
            loss.set_keys(prox_log_prob=(PROX_KEY, "full"))
        if reference is not None:
            loss.set_keys(ref_log_probs=(REFERENCE_KEY, "full"))

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase, version: int, with_mismatch: bool) -> dict[str, float]:
        """Score a batch, in place; return the mismatch between trainer and engine, if it is asked for.

        Args:
            batch: ``[B]``, as collected.
            version: of the weights.
            with_mismatch: whether to measure it, with replay and without.
        """
        if self.reference is not None:
            for part in self._parts(batch):
                with self.precision():
                    self.reference(part)
        if not (with_mismatch or self.writes_prox or self.actor.replay == "R2"):
            return {}
        metrics, live = MismatchMetrics(), MismatchMetrics(thresholds=None)
        entropy = tokens = 0.0
        for part in self._parts(batch):
            with self.precision():
                log_probs, spread, _ = self.scorer.score(part, entropy=with_mismatch)
            if self.writes_prox:
                self._write(part, log_probs)
            if not with_mismatch:
                continue
            metrics.update(part, log_probs, version=version)
            assert spread is not None
            known = self._sampled(part, log_probs)
            entropy, tokens = entropy + float(spread[known].sum()), tokens + float(known.sum())
            if self.live is not None:
                with self.precision():
                    live.update(part, self.live.score(part.copy(), entropy=False)[0])
        return _figures(metrics, live, entropy / max(tokens, 1.0)) if with_mismatch else {}

    def _parts(self, batch: TensorDictBase) -> Iterator[TensorDictBase]:
        return (batch[part] for part in micro_batches(lengths_of(batch), self.max_tokens))

    @staticmethod
    def _write(part: TensorDictBase, log_probs: torch.Tensor) -> None:
        """Give each sample its row, without the pads on the left."""
        for sample, row in zip(part.unbind(0), log_probs, strict=True):
            sample.set((PROX_KEY, "full"), row[len(row) - len(sample.get(("tokens", "full"))) :].cpu())

    @staticmethod
    def _sampled(part: TensorDictBase, log_probs: torch.Tensor) -> torch.Tensor:
        sampled = part.get(("log_probs", "full"), as_padded_tensor=True, padding_side="left", padding_value=torch.nan)
        return sampled.isfinite().to(log_probs.device)


def _figures(metrics: MismatchMetrics, live: MismatchMetrics, entropy: float) -> dict[str, float]:
    found, unaided = metrics.compute(), live.compute()
    figures = {name: found[f"mismatch/{figure}"] for name, figure in FIGURES.items() if f"mismatch/{figure}" in found}
    if "mismatch/dlogp_mean" in unaided:
        figures["dlogp_live"] = unaided["mismatch/dlogp_mean"]
    if "routing/agreement" in found:
        figures["agreement"] = found["routing/agreement"]
    return {**figures, "entropy": entropy}
