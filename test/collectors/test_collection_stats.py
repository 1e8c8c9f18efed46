"""Metrics worked out by hand."""

from __future__ import annotations

import time

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_moe.collectors import group as collection_stats
from torchrl_moe.collectors.group import CollectionStats, Group
from torchrl_moe.collectors.prompt_stream import Prompt


def group(oldest: int, tokens: int, *segments: int, ready_at: float = 0.0) -> Group:
    rows = lazy_stack([TensorDict(num_segments=torch.tensor(count)) for count in segments])
    return Group(0, Prompt(0, TensorDict()), 0, rows=rows, oldest=oldest, tokens=tokens, ready_at=ready_at)


def test_the_metrics_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = CollectionStats()
    groups = [group(5, 10, 1, 1, ready_at=7.0), group(3, 30, 1, 4, ready_at=9.0)]
    for one in (*groups, group(5, 80, 1)):
        stats.completed(one)
    monkeypatch.setattr(collection_stats.time, "monotonic", lambda: 10.0)
    stats.gave_out(groups, version=6)
    found = stats.scalars()
    assert found["inference/staleness_mean"] == 2.0  # 1 and 3
    assert found["inference/staleness_max"] == 3.0
    assert found["inference/queue_age"] == 2.0  # 3 and 1
    assert found["collector/partial_ratio"] == 0.25
    assert found["collector/max_segments"] == 4.0
    assert found["collector/length_trained_over_sampled"] == 0.5  # 20 a group over 40


def test_a_replica_that_is_ahead_makes_no_negative_age() -> None:
    stats = CollectionStats()
    stats.gave_out([group(7, 1, 1)], version=6)
    assert stats.scalars()["inference/staleness_max"] == 0.0


def test_drops_are_counted_by_reason() -> None:
    stats = CollectionStats()
    for reason in ("stale", "failed", "stale"):
        stats.dropped(reason)
    found = stats.scalars()
    assert found["collector/groups_dropped/stale"] == 2.0
    assert found["collector/groups_dropped/failed"] == 1.0
    assert found["collector/refills"] == 3.0


def test_an_engine_is_idle_while_nothing_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stats = CollectionStats()
    now[0] += 2  # idle
    stats.in_flight += 1
    stats.in_flight += 1
    now[0] += 5
    stats.in_flight -= 1
    now[0] += 1
    stats.in_flight -= 1
    now[0] += 2  # idle
    found = stats.scalars()
    assert found["inference/idle"] == pytest.approx(0.4)
    assert found["inference/in_flight"] == 0.0


def test_nothing_is_made_up_before_the_first_batch() -> None:
    found = CollectionStats().scalars()
    assert "inference/staleness_mean" not in found
    assert "collector/length_trained_over_sampled" not in found
