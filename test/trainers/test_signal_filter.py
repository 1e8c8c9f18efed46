"""Groups without a signal are left out, and many in a row are logged."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict import TensorDict, lazy_stack

from torchrl_moe.trainers.roles import SignalFilter


def group(*rewards: float) -> Any:
    return turns(*([reward] for reward in rewards))


def turns(*samples: list[float]) -> Any:
    rows = [(reward, turn == len(sample) - 1) for sample in samples for turn, reward in enumerate(sample)]
    return lazy_stack([TensorDict({"group_id": 3, "next": {"reward": [[r]], "done": [end]}}) for r, end in rows])


def test_a_group_whose_rewards_differ_has_a_signal() -> None:
    keeps = SignalFilter(4)
    assert [keeps(group(*rewards)) for rewards in ((0.0, 1.0), (1.0, 1.0), (0.5, 0.5, 0.4))] == [True, False, True]


def test_turns_are_summed_first() -> None:
    keeps = SignalFilter(4)
    assert not keeps(turns([0.0, 1.0], [0.0, 1.0]))
    assert not keeps(turns([1.0, 0.0], [0.0, 1.0]))
    assert keeps(turns([1.0, 0.0], [1.0, 1.0]))


def test_many_in_a_row_are_logged_and_one_with_a_signal_ends_the_row(caplog: pytest.LogCaptureFixture) -> None:
    keeps = SignalFilter(1)
    for _ in range(9):
        keeps(group(1.0, 1.0))
    keeps(group(1.0, 0.0))
    for _ in range(9):
        keeps(group(1.0, 1.0))
    assert caplog.text == ""
    keeps(group(1.0, 1.0))
    assert "the last 10 groups were left out" in caplog.text
