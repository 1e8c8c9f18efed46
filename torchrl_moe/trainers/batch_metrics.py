"""What a batch of rollouts looks like, in numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_moe._errors import MissingEntryError

__all__ = ["batch_metrics", "sample_rewards"]


def batch_metrics(batch: TensorDictBase, version: int) -> dict[str, float]:
    """Return metrics of a batch as it was collected.

    Args:
        batch: ``[rows]``; the rows of a sample (its turns) are contiguous, and its last row is done.
        version: of the trainer's weights.

    Returns:
        ``reward`` and ``reward_std``, mean and standard deviation over samples of the sum of their rewards;
        ``uniform_groups``, the share of groups whose samples have the same reward; ``length``, generated tokens of a
        row; ``truncated``, the share of rows that reached their last token; ``staleness``, the mean over generated
        tokens of ``version`` less the version that sampled them; ``tokens``, how many were generated.
    """
    rows = batch.unbind(0)
    lengths = [len(row.get(("tokens", "response"))) for row in rows]
    rewards, groups = sample_rewards(rows)
    ages = [version - versions[versions >= 0].float() for versions in map(_versions, rows)]
    tokens = sum(lengths)
    cut = ["finish_reason" in row.keys() and row["finish_reason"] == "length" for row in rows]  # noqa: SIM118
    return {
        "reward": statistics.mean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "uniform_groups": sum(len(set(group)) == 1 for group in groups) / len(groups),
        "length": tokens / len(rows),
        "truncated": sum(cut) / len(rows),
        "staleness": sum(float(age.sum()) for age in ages) / max(sum(map(len, ages)), 1),
        "tokens": float(tokens),
        **_named_rewards(rows),
    }


def _versions(row: TensorDictBase) -> Tensor:
    versions: Tensor = row.get(("policy_versions", "full"))
    return versions


def sample_rewards(rows: Sequence[TensorDictBase]) -> tuple[list[float], list[list[float]]]:
    """Return the rewards of samples, all of them and by group.

    Raises:
        MissingEntryError: a row has no reward.
    """
    groups: dict[int, list[float]] = {}
    total = 0.0
    for row in rows:
        reward = row.get(("next", "reward"), None)
        if reward is None:
            raise MissingEntryError(
                "the rows have no reward: there is nothing at ('next', 'reward'). Give the environment a transform "
                "that writes it, or the trainer a dataset and rewards"
            )
        total += float(reward.sum())
        if bool(row.get(("next", "done")).any()):
            groups.setdefault(int(row.get("group_id")), []).append(total)
            total = 0.0
    return [reward for group in groups.values() for reward in group], list(groups.values())


def _named_rewards(rows: Sequence[TensorDictBase]) -> dict[str, float]:
    """Return the mean of each reward function."""
    named = rows[0].get("rewards", None)
    if named is None:
        return {}
    found: dict[str, float] = {}
    for name in sorted(named.keys()):
        values = [float(row.get(("rewards", name)).sum()) for row in rows]
        known = [value for value in values if not math.isnan(value)]  # NaN: the function abstained
        found |= {f"reward/{name}": statistics.mean(known)} if known else {}
    return found
