"""Signs of a collapse: each by rows that have it and rows that just have not, logged once."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_moe.trainers.run_record import HealthMonitor


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"entropy": [2.0, "", 0.19]}, "the entropy fell from 2 to 0.19 nats"),
        ({"entropy": [2.0, "", 0.21]}, ""),
        ({"reward": [0.8] * 5 + [0.4] * 5}, "the reward fell from 0.80 to 0.40"),
        ({"reward": [0.8] * 5 + [0.42] * 5}, ""),
        ({"reward": [-1.0] * 5 + [-3.0] * 5}, ""),  # a share of what is not positive means nothing
        ({"grad_norm": [1.0] * 5 + [10.5]}, "the gradient has norm 10, usually 1"),
        ({"grad_norm": [1.0] * 5 + [9.5]}, ""),
        ({"truncated": [0.6] * 5}, "0.60 of the last answers were cut"),
        ({"truncated": [1.0] * 4}, ""),
        ({"uniform_groups": [0.9] * 5}, "in 0.90 of the last groups"),
        ({"uniform_groups": [0.8] * 5}, ""),
        ({"dlogp_live": [1e-3] * 5, "dlogp_mean": [2e-3] * 5}, "replay does not help here"),
        ({"dlogp_live": [3e-7] * 5, "dlogp_mean": [4e-7] * 5}, ""),
        ({"dlogp_live": ["", 1e-3] * 3, "dlogp_mean": ["", 2e-3] * 3}, ""),  # three of them
    ],
)
def test_a_sign_is_seen_and_what_is_near_it_is_not(columns: dict[str, list[Any]], message: str) -> None:
    found = HealthMonitor().check(rows(**columns))
    assert [message in text for text in found] == ([True] if message else [])


def test_a_sign_is_logged_once_and_again_after_it_had_gone(caplog: pytest.LogCaptureFixture) -> None:
    monitor = HealthMonitor()
    high, low = rows(truncated=[1.0] * 5), rows(truncated=[0.0] * 5)
    assert [len(monitor.check(part)) for part in (high, high, low, high)] == [1, 0, 0, 1]
    assert caplog.text.count("were cut at max_new_tokens") == 2
