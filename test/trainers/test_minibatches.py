"""Minibatches: every sample once in an epoch, another order in each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_moe.trainers.learner import Minibatches
from torchrl_moe.trainers.ranks import Ranks


def batch_of(count: int) -> TensorDict:
    return TensorDict({"sample": torch.arange(count)}, batch_size=[count])


def epoch(parts: Minibatches, batch: TensorDictBase) -> list[list[int]]:
    parts.begin(batch)
    found = []
    while True:
        try:
            found.append(parts(batch)["sample"].tolist())
        except StopIteration:
            return found


def test_one_minibatch_is_the_batch_as_it_is() -> None:
    assert epoch(Minibatches(1), batch_of(5)) == [[0, 1, 2, 3, 4]]


def test_each_epoch_has_every_sample_once_in_another_order() -> None:
    torch.manual_seed(0)
    parts, batch = Minibatches(3), batch_of(7)
    first, second = epoch(parts, batch), epoch(parts, batch)
    for found in (first, second):
        assert [len(part) for part in found] == [3, 2, 2]
        assert sorted(i for part in found for i in part) == list(range(7))
    assert first != second


def test_a_batch_of_fewer_samples_than_minibatches_has_as_many_as_it_has_samples() -> None:
    assert sorted(epoch(Minibatches(4), batch_of(2))) == [[0], [1]]


def test_an_epoch_ends_by_stop_iteration_which_torchrls_trainer_takes_for_its_end() -> None:
    with pytest.raises(StopIteration):
        Minibatches(1)(batch_of(1))


class Second(Ranks):
    """A rank that is told what to draw from."""

    rank, size = 1, 2

    def from_first(self, value: Any, phase: str) -> Any:
        return 17


def test_ranks_that_see_the_same_samples_split_them_alike() -> None:
    torch.manual_seed(0)
    first = epoch(Minibatches(3, Second()), batch_of(7))
    torch.manual_seed(5)
    assert epoch(Minibatches(3, Second()), batch_of(7)) == first
