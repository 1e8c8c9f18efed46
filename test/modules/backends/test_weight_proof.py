"""The comparison of an engine's log-probs with the trainer's."""

from __future__ import annotations

import math

import pytest

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.commands import compare_log_probs


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([-1.5, -2.25], r"up to 5.0e-01 \(at token 1: -1.5 and -1\)"),
        ([-1.5, math.nan], r"up to nan \(at token 2: nan and -2\)"),
        ([math.inf, -2.0], r"up to inf \(at token 1"),
    ],
)
def test_the_largest_difference_is_named(got: list[float], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        compare_log_probs(got, [-1.0, -2.0], 1e-3)


def test_a_difference_may_be_as_large_as_the_tolerance() -> None:
    compare_log_probs([-1.25], [-1.0], 0.25)
    compare_log_probs([], [], 0.0)
