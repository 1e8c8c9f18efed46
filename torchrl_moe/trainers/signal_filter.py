"""``SignalFilter``: leaves out groups whose answers have the same reward, and says so if all of them have."""

from __future__ import annotations

import logging

from tensordict import TensorDictBase

__all__ = ["SignalFilter"]

LOG = logging.getLogger(__name__)

BATCHES = 10
"""So many batches' worth of groups are left out in a row before that is logged."""


class SignalFilter:
    """Whether there is anything to learn from a group: DAPO's dynamic sampling (arXiv 2503.14476).

    Args:
        groups: of a batch.
    """

    def __init__(self, groups: int) -> None:
        self._limit = BATCHES * groups
        self._left_out = 0

    def __call__(self, group: TensorDictBase) -> bool:
        """Whether the rows of a group, ``[rows]``, have different rewards."""
        rewards = {float(row.get(("next", "reward")).sum()) for row in group.unbind(0)}
        self._left_out = 0 if len(rewards) > 1 else self._left_out + 1
        if self._left_out and self._left_out % self._limit == 0:
            LOG.warning(
                "the last %d groups were left out, each with the same reward throughout: the prompts are too easy or "
                "too hard, or the reward is always the same; drop_uniform_groups waits for others",
                self._left_out,
            )
        return len(rewards) > 1
