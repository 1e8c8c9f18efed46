"""Metrics of a batch, by hand."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from torchrl_moe.errors import MissingEntryError
from torchrl_moe.trainers.run_record import batch_metrics, sample_rewards


def row(group: int, reward: float, tokens: int, version: int, *, done: bool = True, cut: bool = False) -> TensorDict:
    versions = torch.full((2 + tokens,), version, dtype=torch.int32)
    versions[:2] = -1
    return TensorDict(
        {
            "tokens": {"response": torch.zeros(tokens, dtype=torch.int64)},
            "policy_versions": {"full": versions},
            "next": {"reward": torch.tensor([[reward]]), "done": torch.tensor([done])},
            "group_id": torch.tensor(group),
            "finish_reason": NonTensorData("length" if cut else "stop"),
            "rewards": {"exact": torch.tensor([reward])},
        }
    )


def test_rewards_are_of_samples_and_lengths_of_rows() -> None:
    batch = lazy_stack(
        [
            row(5, 0.0, 3, 7, done=False),  # a sample of two turns
            row(5, 1.0, 5, 7, cut=True),
            row(5, 0.0, 2, 6),
            row(9, 0.0, 4, 5),
            row(9, 0.0, 6, 7),
        ]
    )
    metrics = batch_metrics(batch, version=7)
    # rewards 1, 0, 0, 0; ages: 8 tokens of 0, 2 of 1, 4 of 2, 6 of 0
    assert metrics == {
        "reward": 0.25,
        "reward_std": pytest.approx(0.1875**0.5),
        "uniform_groups": 0.5,
        "length": 4.0,
        "truncated": 0.2,
        "staleness": 0.5,
        "tokens": 20.0,
        "reward/exact": 0.2,
    }


def test_rows_without_a_reward_are_refused_with_its_key() -> None:
    with pytest.raises(MissingEntryError, match=r"the rows have no reward: there is nothing at \('next', 'reward'\)"):
        sample_rewards([TensorDict({"next": {"done": torch.tensor([True])}})])
