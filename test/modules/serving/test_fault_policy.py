"""The settings by which faults are judged."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_moe.modules.serving.candidates import FaultPolicy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attempts": 0}, "attempts must be an integer of at least 1, got 0"),
        ({"breaker_failures": 0}, "breaker_failures must be an integer of at least 1, got 0"),
        ({"breaker_trials": 0}, "breaker_trials must be an integer of at least 1, got 0"),
        ({"max_restarts": -1}, "max_restarts must be an integer of at least 0, got -1"),
        ({"patience": -0.5}, r"patience must be a number of at least 0, got -0\.5"),
        ({"probe": 0}, "probe must be a number above 0, got 0"),
    ],
)
def test_a_figure_out_of_range_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FaultPolicy(**given)


def test_delays_double_up_to_the_longest_however_many_there_were() -> None:
    policy = FaultPolicy(first_delay=0.25, longest_delay=1.5)
    assert [policy.delay(recent) for recent in (0, 1, 2, 3, 10**6)] == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert FaultPolicy(first_delay=0.0).delay(5) == 0.0
