"""What a report says of an update."""

from __future__ import annotations

import pytest

from torchrl_moe.weight_update import SyncReport
from torchrl_moe.weight_update.report import ReplicaSync

GOOD = ReplicaSync(replica=0, waited=1.0, fetched=0.25, paused=0.5, loaded=0.125, attempts=1)
BAD = ReplicaSync(replica=1, fetched=0.25, error="the replica is DEAD")


def report(*replicas: ReplicaSync) -> SyncReport:
    return SyncReport(version=3, nbytes=12_300_000, digest="0123456789abcdef", published=0.25, replicas=replicas)


def test_failed_names_the_replicas_without_the_version_and_why() -> None:
    assert report(GOOD, BAD).failed == {1: "the replica is DEAD"}
    assert report(GOOD).failed == {}


def test_seconds_are_those_of_publishing_and_of_every_replica() -> None:
    assert report(GOOD, BAD).seconds == pytest.approx(0.25 + 0.25 + 1.5)
    assert report().seconds == 0.25


def test_its_line_shows_version_replicas_size_time_and_pause() -> None:
    assert repr(report(GOOD, BAD)) == (
        "SyncReport(version=3, replicas=1/2, 12.3 MB, 2.000 s, longest pause 0.500 s, digest=01234567)"
    )
    assert "replicas=0/0" in repr(report())
