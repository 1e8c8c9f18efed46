"""``Minibatches``: the parts of a batch that the optimizer steps on one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

__all__ = ["Minibatches"]


class Minibatches(TrainerHookBase):
    """Gives the optimizer a batch in parts, in another order in each epoch.

    Args:
        count: optimizer steps of an epoch. A batch of fewer samples than that has as many as it has samples.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._parts: Iterator[TensorDictBase] = iter(())

    def begin(self, batch: TensorDictBase) -> TensorDictBase:
        """Begin an epoch: shuffle the samples, by torch's global generator."""
        if self.count == 1:
            self._parts = iter((batch,))
        else:
            order = torch.randperm(len(batch)).tensor_split(min(self.count, len(batch)))
            self._parts = (batch[part.tolist()] for part in order)
        return batch

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the next part.

        Raises:
            StopIteration: the epoch is over; TorchRL's trainer takes it for that.
        """
        del batch
        return next(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: checkpoints are taken between batches."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""
        del state_dict

    def register(self, trainer: Trainer, name: str = "minibatches") -> None:
        """Register at the stages that it serves."""
        trainer.register_module(name, self)
        trainer.register_op("pre_epoch", self.begin)
        trainer.register_op("process_optim_batch", self)
