"""Carriers of what a replica says: small, frozen, and read by name."""

from __future__ import annotations

import dataclasses

import pytest

from torchrl_moe.modules.backends.replica import ProbeReport, ReplicaInfo, ReplicaStats, SwapReport
from torchrl_moe.weight_update.transports.base import StageReport


@pytest.mark.parametrize(("queries", "hits", "rate"), [(0, 0, 0.0), (8, 2, 0.25), (5, 5, 1.0)])
def test_the_hit_rate_is_of_tokens_looked_up(queries: int, hits: int, rate: float) -> None:
    assert ReplicaStats(cache_queries=queries, cache_hits=hits).hit_rate == rate


@pytest.mark.parametrize(
    "report",
    [
        ProbeReport(core_answered=True),
        ReplicaInfo(model="m", layout=None, max_model_len=8),
        ReplicaStats(),
        StageReport(seconds=0.5, nbytes=8, digest="d"),
        SwapReport(),
    ],
)
def test_a_report_does_not_change(report: object) -> None:
    name = dataclasses.fields(report)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(report, name, None)
    with pytest.raises((AttributeError, TypeError)):  # no field of that name
        report.surprise = 1  # type: ignore[attr-defined]


def test_an_engine_can_follow_routes_unless_it_says_why_not() -> None:
    assert ReplicaInfo(model="m", layout=None, max_model_len=8).forced_routing_unavailable_reason == ""
