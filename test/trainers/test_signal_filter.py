"""Groups without a signal are left out, and many in a row are logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_moe.trainers.signal_filter import SignalFilter


def group(*rewards: float) -> Any:
    return lazy_stack([TensorDict({"next": {"reward": torch.tensor([[reward]])}}) for reward in rewards])


def test_a_group_whose_rewards_differ_has_a_signal() -> None:
    keeps = SignalFilter(4)
    assert [keeps(group(*rewards)) for rewards in ((0.0, 1.0), (1.0, 1.0), (0.5, 0.5, 0.4))] == [True, False, True]


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
