"""One group: the answers to one prompt that are compared with one another."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack

from torchrl_moe.collectors.prompt_stream import Prompt

__all__ = ["Group"]


@dataclass(slots=True)
class Group:
    """A prompt and the group of answers to it.

    Attributes:
        number: its index in the order of starting.
        prompt: from the data.
        begun_at: monotonic seconds.
        begun_version: of the newest weights when it started.
        rows: once complete, one TensorDict per answer and turn, ``[rows]``.
        oldest: the version of its oldest token.
        is_ready: whether it may be trained on.
        ready_at: monotonic seconds when it was complete.
        tokens: generated for it.
    """

    number: int
    prompt: Prompt
    begun_version: int
    begun_at: float = field(default_factory=time.monotonic)
    rows: TensorDictBase | None = None
    oldest: int = -1
    is_ready: bool = False
    ready_at: float = 0.0
    tokens: int = 0

    def complete(self, episodes: list[list[TensorDictBase]], only_last: bool, version_in_next: bool = False) -> None:
        """Take the rows of its episodes, sample by sample, each with its turns in order.

        Args:
            episodes: of each, the turns, ``[k]``.
            only_last: whether to keep only the last turn of each sample.
            version_in_next: whether rows have their version in ``next`` too, as TorchRL's do.

        Raises:
            ValueError: a reward is NaN or infinite.
        """
        samples: list[list[TensorDictBase]] = []
        for turns in episodes:
            samples += [list(rows) for rows in zip(*(turn.unbind(0) for turn in turns), strict=True)]
        every = [row for rows in samples for row in rows]
        for row in every:
            reward = row.get(("next", "reward"), None)
            if reward is not None and not reward.isfinite().all():
                raise ValueError(f"the environment's reward is {reward.tolist()}: a reward must be finite, in float32")
        kept = [row for rows in samples for row in (rows[-1:] if only_last else rows)]
        for row in kept:
            row.set("group_id", torch.tensor(self.number))
            if version_in_next:
                row.set(("next", "policy_version"), row.get("policy_version"))
        versions = [int(row.get("policy_version")) for row in every]
        self.oldest = min((version for version in versions if version >= 0), default=self.begun_version)
        self.tokens = sum(len(row.get(("tokens", "response"))) for row in every)
        self.rows = lazy_stack(kept)
        self.ready_at = time.monotonic()

    def state_dict(self, version: int) -> dict[str, Any]:
        """Return a complete group for a checkpoint; later changes to its rows do not affect it.

        Args:
            version: the newest.
        """
        assert self.rows is not None
        return {
            "position": self.prompt.position,
            "data": self.prompt.data,
            "rows": lazy_stack([row.copy() for row in self.rows.unbind(0)]),
            "age": version - self.oldest,
            "tokens": self.tokens,
        }

    @classmethod
    def restored(cls, number: int, state: Mapping[str, Any], version: int) -> Group:
        """Return the group of a state, with the age that it had; its rows keep their ``group_id``."""
        group = cls(number, Prompt(state["position"], state["data"]), version, rows=state["rows"])
        group.oldest, group.tokens, group.ready_at = version - state["age"], state["tokens"], time.monotonic()
        return group
