"""Advantages as transforms of a replay buffer: GRPO, RLOO, Dr. GRPO, REINFORCE++.

They replace TorchRL's ``MCAdvantage``, and read and write the same keys. Either each batch holds complete groups, or
the trajectories of a group are held back until the last one arrives. The return of a trajectory is the sum of its
rewards. Each of its steps gets the trajectory's advantage, in the shape of the step's reward: ``[1, 1]``, or ``[T, 1]``
for rewards per token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack, unravel_key
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_moe import _checks

EPSILON = 1e-6
GROUP_KEY, PROMPT_KEY = "group_id", "query"


class Trajectory(NamedTuple):
    """Steps with batch size ``[]``, the last one done, and the sum of their rewards."""

    steps: Sequence[TensorDictBase]
    value: float


class GroupAdvantage(Transform):
    """Computes advantages of the trajectories of a group.

    Trajectories may arrive in any order; the steps of each are contiguous.

    Args:
        group_size: trajectories of a group, which are held back until all have arrived; ``None``: each batch holds
            complete groups, of any sizes, as those of ``AsyncLLMCollector`` do. A group of one gets advantage 0.
        prompt_key: the entry that identifies a group, the same in all steps of a trajectory: text, or a tensor compared
            by value. Default: ``"group_id"`` where a step has it (it distinguishes two groups of the same prompt), else
            ``"query"``.
        rewards_key, advantage_key, done_key: the entries that are read and written.

    Raises:
        ValueError: ``group_size`` is below 2.
    """

    requires_shared_write_state = True  # makes TorchRL refuse to share a buffer whose groups would never complete

    def __init__(
        self,
        group_size: int | None = None,
        prompt_key: NestedKey | None = None,
        rewards_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
        done_key: NestedKey = ("next", "done"),
    ) -> None:
        _checks.check_number("group_size", group_size, 2, whole=True, none=True, hint="An advantage is a comparison.")
        given = {"rewards_key": rewards_key, "advantage_key": advantage_key, "done_key": done_key}
        for name, key in {**given, "prompt_key": PROMPT_KEY if prompt_key is None else prompt_key}.items():
            if not (key and isinstance(key, str | tuple) and all(isinstance(part, str) for part in unravel_key(key))):
                raise ValueError(
                    f"{name} must be a key of a tensordict, text or a tuple of texts, got {_checks.shown(key)}."
                )
        grouped_by = [GROUP_KEY, PROMPT_KEY] if prompt_key is None else [prompt_key]
        super().__init__(in_keys=[*grouped_by, rewards_key, done_key], out_keys=[advantage_key])
        self.group_size = group_size
        self.prompt_key, self.rewards_key = prompt_key, rewards_key
        self.advantage_key, self.done_key = advantage_key, done_key
        self._queues: dict[Hashable, list[Trajectory]] = {}

    @property
    def queued_trajectories(self) -> int:
        """Number of trajectories that wait for others of their group."""
        return sum(map(len, self._queues.values()))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return samples from the buffer unchanged."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Add complete trajectories; return the steps of all groups that are complete now, or ``None``."""
        groups = self._whole_groups(list(self._trajectories(tensordict)))
        finished = [step for group in groups for step in self._complete(group)]
        return lazy_stack(finished) if finished else None

    def _trajectories(self, tensordict: TensorDictBase) -> Iterator[Trajectory]:
        if not tensordict.ndim:
            raise ValueError("advantages need a batch of steps, got a single step: extend the buffer by a batch [N].")
        if tensordict.ndim > 1:
            for row in tensordict.unbind(0):
                yield from self._trajectories(row)
            return
        steps: list[TensorDictBase] = []
        for step in tensordict.unbind(0):
            steps.append(step)
            if bool(self._entry(step, self.done_key).any()):
                yield Trajectory(steps, sum(self._reward(step) for step in steps))
                steps = []
        if steps:
            raise ValueError(
                f"the last trajectory of the batch is not done: {self.done_key!r} of its last step is false. Give "
                "whole trajectories, as a collector with yield_completed_trajectories=True does."
            )

    def _whole_groups(self, arrived: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
        """Queue trajectories; yield the groups that are complete now."""
        groups = [self._group(trajectory.steps) for trajectory in arrived]  # raises before anything is queued
        for group, trajectory in zip(groups, arrived, strict=True):
            queue = self._queues.setdefault(group, [])
            queue.append(trajectory)
            if len(queue) == self.group_size:
                yield self._queues.pop(group)
        if self.group_size is None:
            whole, self._queues = self._queues, {}
            yield from whole.values()

    def _complete(self, group: list[Trajectory]) -> list[TensorDictBase]:
        """Add a complete group; return the steps that are complete now, with their advantages."""
        advantages = self._advantages(torch.tensor([one.value for one in group], dtype=torch.float64))
        for trajectory, advantage in zip(group, advantages, strict=True):
            for step in trajectory.steps:
                reward = step[self.rewards_key]
                step.set(self.advantage_key, advantage.to(reward).expand(reward.shape).clone())
        return [step for trajectory in group for step in trajectory.steps]

    @abstractmethod
    def _advantages(self, returns: Tensor) -> Tensor:
        """Return the advantages of trajectories that are compared, ``[n]``, from their returns ``[n]``."""

    def _entry(self, step: TensorDictBase, key: NestedKey) -> Any:
        value = step.get(key, None)
        if value is None:
            known = ", ".join(sorted(map(repr, step.keys(True, True))))
            raise ValueError(f"{type(self).__name__} needs {key!r} in every step, got {known}.")
        return value

    def _reward(self, step: TensorDictBase) -> float:
        reward = self._entry(step, self.rewards_key)
        _checks.check_floating(repr(self.rewards_key), reward)
        value = float(reward.sum(dtype=torch.float64))  # of many tokens: half precision would round, or overflow
        if not abs(value) < float("inf"):
            raise ValueError(f"{self.rewards_key!r} must be finite, got {value}: it would corrupt its whole group.")
        return value

    def _group(self, steps: Sequence[TensorDictBase]) -> Hashable:
        groups = list(dict.fromkeys(map(self._group_of_step, steps)))
        if len(groups) > 1:
            raise ValueError(
                f"a trajectory has steps of groups {groups[0]!r} and {groups[1]!r}: its steps must be contiguous, "
                f"the last one with {self.done_key!r}. Was a last step filtered out?"
            )
        return groups[0]

    def _group_of_step(self, step: TensorDictBase) -> Hashable:
        key = self.prompt_key
        if key is None:
            key = PROMPT_KEY if step.get(GROUP_KEY, None) is None else GROUP_KEY
        group = self._entry(step, key)
        if isinstance(group, Tensor):
            return tuple(group.flatten().tolist())
        group = step[key]
        if not isinstance(group, str):
            raise ValueError(f"{key!r} must be text or a tensor, got {type(group).__name__}.")
        return group


class GRPOAdvantage(GroupAdvantage):
    """``A_i = (R_i - mean_j R_j) / std_j R_j``: TorchRL's ``MCAdvantage``, for complete groups of any size.

    GRPO (arXiv 2402.03300). The standard deviation is the unbiased one, at least 1e-6. For several steps the values
    equal ``MCAdvantage(trajectory_return="sum")``: by default ``MCAdvantage`` compares single steps, which penalises
    the early turns of a sample that is rewarded at its end.

    Example::

        buffer = ReplayBuffer(storage=LazyStackStorage(128), transform=GRPOAdvantage())
        collector = AsyncLLMCollector(env, policy=policy, group_size=8, replay_buffer=buffer)
    """

    def _advantages(self, returns: Tensor) -> Tensor:
        return _standardised(returns)


class RLOOAdvantage(GroupAdvantage):
    """``A_i = R_i - mean_{j != i} R_j``: the other answers to the prompt are the baseline.

    REINFORCE leave-one-out (arXiv 2402.14740): unbiased, since the baseline does not depend on the answer.

    Example::

        buffer = ReplayBuffer(storage=LazyStackStorage(128), transform=RLOOAdvantage(8))
    """

    def _advantages(self, returns: Tensor) -> Tensor:
        return (returns - returns.mean()) * len(returns) / max(len(returns) - 1, 1)


class DrGRPOAdvantage(GroupAdvantage):
    """``A_i = R_i - mean_j R_j``: GRPO's advantage without the division by the standard deviation.

    Dr. GRPO (arXiv 2503.20783, sec. 3): the division would give prompts that are nearly always or nearly never solved
    more weight than the rest. The other half of Dr. GRPO is
    ``GRPOLoss(aggregation="fixed_length", fixed_length=n)``. The value is ``(G - 1) / G`` times RLOO's.
    """

    def _advantages(self, returns: Tensor) -> Tensor:
        return returns - returns.mean()


class ReinforcePlusPlusAdvantage(GroupAdvantage):
    """``A_i = (R_i - mean R) / std R`` over the whole batch, not over a prompt's answers.

    REINFORCE++ (arXiv 2501.03262). With ``group_size`` it is the paper's baseline variant: the mean of the group is
    subtracted first. The standard deviation is the unbiased one, at least 1e-6. The paper's per-token KL penalty is not
    included: it belongs in the reward.

    Args:
        batch_size: trajectories that are normalised together; they are held back until all have arrived.
        group_size: answers per prompt, for the baseline variant; a divisor of ``batch_size``. ``None``: no baseline.
        keys: as those of :class:`GroupAdvantage`: ``prompt_key``, ``rewards_key``, ``advantage_key``, ``done_key``.
    """

    def __init__(self, batch_size: int, group_size: int | None = None, **keys: NestedKey) -> None:
        super().__init__(group_size, **keys)
        _checks.check_number("batch_size", batch_size, 2, whole=True)
        if batch_size % (group_size or 1):
            raise ValueError(
                f"batch_size must be a multiple of group_size, got batch_size={batch_size} and group_size={group_size}."
            )
        self.batch_size = batch_size
        self._pool: list[Trajectory] = []

    @property
    def queued_trajectories(self) -> int:
        """Number of trajectories that wait for others of their group, or of their batch."""
        return super().queued_trajectories + len(self._pool)

    def _whole_groups(self, arrived: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
        yield from ([one] for one in arrived) if self.group_size is None else super()._whole_groups(arrived)

    def _complete(self, group: list[Trajectory]) -> list[TensorDictBase]:
        values = torch.tensor([one.value for one in group], dtype=torch.float64)
        baseline = 0.0 if self.group_size is None else float(values.mean())
        self._pool += [Trajectory(steps, value - baseline) for steps, value in group]
        if len(self._pool) < self.batch_size:
            return []
        batch, self._pool = self._pool, []
        return super()._complete(batch)

    def _advantages(self, returns: Tensor) -> Tensor:
        return _standardised(returns)


def _standardised(returns: Tensor) -> Tensor:
    # the standard deviation of one return is 0
    return (returns - returns.mean()) / returns.std(correction=min(1, len(returns) - 1)).clamp(min=EPSILON)
