"""``Minibatches``: the parts of a batch that the optimizer steps on one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_moe.trainers.rank_group import Ranks

__all__ = ["Minibatches"]


class Minibatches(TrainerHookBase):
    """Gives the optimizer a batch in parts, in a new order in each epoch.

    With several ranks, each splits its own share. Ranks that see the same samples split them in the same way.

    Args:
        count: optimizer steps per epoch; a batch with fewer samples gets one step per sample.
        ranks: of the run; all use the random seed that rank 0 draws.
    """

    def __init__(self, count: int, ranks: Ranks | None = None) -> None:
        self.count, self._ranks = count, ranks or Ranks()
        self._parts: Iterator[TensorDictBase] = iter(())

    def begin(self, batch: TensorDictBase) -> TensorDictBase:
        """Begin an epoch: shuffle the samples, by torch's global generator."""
        if self.count == 1:
            self._parts = iter((batch,))
        else:
            seed = self._ranks.from_first(int(torch.randint(1 << 62, ())), "minibatches")
            drawn = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
            order = drawn.tensor_split(min(self.count, len(batch)))
            self._parts = (batch[part.tolist()] for part in order)
        return batch

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the next part.

        Raises:
            StopIteration: the epoch is over, as TorchRL's trainer expects.
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
