"""``SignalFilter``: drops groups whose answers all have the same reward, and warns if every group does."""

from __future__ import annotations

import logging

from tensordict import TensorDictBase

from torchrl_moe.trainers.batch_metrics import sample_rewards

__all__ = ["SignalFilter"]

LOG = logging.getLogger(__name__)

BATCHES = 10
"""Batches' worth of groups that are dropped in a row before a warning is logged."""


class SignalFilter:
    """Decides whether there is anything to learn from a group: DAPO's dynamic sampling (arXiv 2503.14476).

    Args:
        groups: number of groups in a batch.
    """

    def __init__(self, groups: int) -> None:
        self._limit = BATCHES * groups
        self._left_out = 0

    def __call__(self, group: TensorDictBase) -> bool:
        """Whether the samples of a group, ``[rows]``, have different rewards, each the sum of its turns'."""
        rewards = set(sample_rewards(group.unbind(0))[0])
        self._left_out = 0 if len(rewards) > 1 else self._left_out + 1
        if self._left_out and self._left_out % self._limit == 0:
            LOG.warning(
                "the last %d groups were left out, each with the same reward throughout: the prompts are too easy or "
                "too hard, or the reward is always the same; drop_uniform_groups waits for others",
                self._left_out,
            )
        return len(rewards) > 1
