"""Settings refuse what makes no sense; ``test_async_collector.py`` has the words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from support.values import VALUES
from torchrl_moe.collectors.arguments import Settings
from torchrl_moe.collectors.schedule import Schedule


def test_the_defaults_are_those_of_the_collector() -> None:
    settings = Settings()
    assert (settings.max_staleness, settings.order, settings.window, settings.on_stale) == (2, "window", 0.3, "wait")
    assert (settings.max_in_flight, settings.over_sample, settings.max_failures) == ("auto", 1.0, 0)
    assert (settings.reward_timeout, settings.heartbeat_timeout) == (None, 300.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"group_size": 0},
        {"on_stale": "keep"},
        {"over_sample": 2.0},
        {"max_in_flight": "all"},
        {"max_in_flight": 0},
        {"max_failures": -1},
        {"reward_timeout": -1.0},
        {"heartbeat_timeout": 0.0},
        {"heartbeat_timeout": float("nan")},
    ],
)
def test_bad_values_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad)).replace("over_sample", "on_stale")):
        Settings(**bad)


def test_no_timeouts_at_all_are_fine() -> None:
    assert Settings(reward_timeout=None, heartbeat_timeout=None, over_sample=2.0, on_stale="drop").over_sample == 2.0


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_each_setting_takes_a_value_or_refuses_it_by_its_name(name: str) -> None:
    for value in VALUES:
        try:
            settings = Settings(**{name: value})
            Schedule(settings.groups_per_batch, settings.max_staleness, settings.order, settings.window)
        except ValueError as error:
            assert name in str(error), (value, str(error))
