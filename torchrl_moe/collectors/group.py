"""A group of answers that are compared with one another, and the counts of a collection."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from tensordict import TensorDictBase, lazy_stack

from torchrl_moe.collectors.prompt_stream import Prompt


class GroupState(TypedDict):
    """A complete group in a checkpoint."""

    position: int
    data: TensorDictBase
    rows: TensorDictBase
    age: int
    tokens: int


@dataclass(slots=True)
class Group:
    """A prompt and the group of answers to it."""

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
        """Take the rows of its episodes, sample by sample, each with its turns in order."""
        # from turns of several samples to samples of several turns
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
        # age and length are of all turns, those that are not kept too: -1 is a row without a sampled token
        versions = [int(row.get("policy_version")) for row in every]
        self.oldest = min((version for version in versions if version >= 0), default=self.begun_version)
        self.tokens = sum(len(row.get(("tokens", "response"))) for row in every)
        self.rows = lazy_stack(kept)
        self.ready_at = time.monotonic()

    def state_dict(self, version: int) -> GroupState:
        """Return a complete group for a checkpoint; later changes to its rows do not affect it."""
        assert self.rows is not None
        return {
            "position": self.prompt.position,
            "data": self.prompt.data,
            "rows": lazy_stack([row.copy() for row in self.rows.unbind(0)]),
            "age": version - self.oldest,
            "tokens": self.tokens,
        }

    @classmethod
    def restored(cls, number: int, state: GroupState, version: int) -> Group:
        """Return the group of a state, with the age that it had; its rows keep their ``group_id``."""
        group = cls(number, Prompt(state["position"], state["data"]), version, rows=state["rows"])
        group.oldest, group.tokens, group.ready_at = version - state["age"], state["tokens"], time.monotonic()
        return group


class CollectionStats:
    """Counts of a collector, and metrics of its last batch, under the names of TorchRL's scripts where they have one.

    One thread writes; any may read.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._in_flight = 0
        self._began = time.monotonic()
        self._changed_at = self._began
        self._idle = 0.0  # seconds without an answer in flight
        self._drops: Counter[str] = Counter()
        self._sampled = [0, 0]  # answers, tokens: of all groups that were completed
        self._trained = [0, 0]
        self._batch: dict[str, float] = {}

    @property
    def in_flight(self) -> int:
        """Answers that are being generated."""
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        now = time.monotonic()
        # idle is the time at a count of 0, added up whenever the count changes
        if not self._in_flight:
            self._idle += now - self._changed_at
        self._changed_at = now
        self._in_flight = count

    def completed(self, group: Group) -> None:
        """Count a group that may be trained on."""
        self._sampled[0] += 1
        self._sampled[1] += group.tokens

    def dropped(self, reason: str) -> None:
        """Count a group that is dropped and replaced."""
        self._drops[reason] += 1

    def gave_out(self, groups: Sequence[Group], version: int) -> None:
        """Set the metrics of a batch that is trained on at a version."""
        now = time.monotonic()
        ages = [max(version - group.oldest, 0) for group in groups]
        rows = [row for group in groups if group.rows is not None for row in group.rows.unbind(0)]
        segments = [int(row.get("num_segments")) for row in rows]
        for group in groups:
            self._trained[0] += 1
            self._trained[1] += group.tokens
        self._batch = {
            "inference/staleness_mean": sum(ages) / len(ages),
            "inference/staleness_max": float(max(ages)),
            "inference/queue_age": sum(now - group.ready_at for group in groups) / len(groups),
            "collector/partial_ratio": sum(count > 1 for count in segments) / len(segments),
            "collector/max_segments": float(max(segments)),
        }

    def scalars(self) -> dict[str, float]:
        """Return all metrics by name, for a logger."""
        now = time.monotonic()
        seconds = max(now - self._began, 1e-9)
        idle = self._idle + (0.0 if self._in_flight else now - self._changed_at)
        found = {
            **self._batch,
            "inference/in_flight": float(self._in_flight),
            "inference/idle": idle / seconds,
            "collector/failures": float(self.failures),
            "collector/refills": float(sum(self._drops.values())),
        }
        found |= {f"collector/groups_dropped/{reason}": float(count) for reason, count in sorted(self._drops.items())}
        # below 1, long answers are dropped more often than short ones
        if self._trained[0] and self._sampled[1]:
            trained, sampled = (tokens / groups for groups, tokens in (self._trained, self._sampled))
            found["collector/length_trained_over_sampled"] = trained / sampled
        return found
