"""Deliberate faults, as hooks of a training run: a check that notices none of them checks nothing.

``hooks=[torchrl_moe.testing.faults:shift_routes]`` puts one into a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["shift_routes", "shuffle_advantages", "wrong_ids"]

ROUTES = ("routed_experts", "full")


def shift_routes(trainer: Any) -> None:
    """Give each token the experts of the token before it."""
    trainer.collector.postproc = _on_routes(lambda routes: torch.cat([routes[-1:], routes[:-1]]))


def wrong_ids(trainer: Any) -> None:
    """Replace each expert by the one with the next number."""

    def other(routes: Tensor) -> Tensor:
        return torch.where(routes < 0, routes, (routes + 1) % (int(routes.max()) + 1))

    trainer.collector.postproc = _on_routes(other)


def shuffle_advantages(trainer: Any) -> None:
    """Shuffle the advantages over the answers."""

    def shuffled(batch: TensorDictBase) -> TensorDictBase:
        order = torch.randperm(len(batch)).tolist()
        for row, advantage in zip(batch.unbind(0), [batch[i].get("advantage").clone() for i in order], strict=True):
            row.set("advantage", advantage)
        return batch

    trainer.register_op("batch_process", shuffled)


def _on_routes(change: Callable[[Tensor], Tensor]) -> Callable[[TensorDictBase], TensorDictBase]:
    def changed(batch: TensorDictBase) -> TensorDictBase:
        for sample in batch.unbind(0):
            sample.set(ROUTES, change(sample.get(ROUTES)))
        return batch

    return changed
