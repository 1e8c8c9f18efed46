"""What a report says of an update."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from support.html_table import TableReader
from torchrl_moe.weight_update import SyncReport
from torchrl_moe.weight_update.report import ReplicaSync

GOOD = ReplicaSync(
    replica=0, asked_at=0.25, fetched=0.25, swap_at=0.5, waited=1.0, paused=0.5, loaded=0.125, attempts=1
)
BAD = ReplicaSync(replica=1, asked_at=0.25, fetched=0.25, staged=3.0, error="the replica is DEAD")


def report(*replicas: ReplicaSync) -> SyncReport:
    return SyncReport(version=3, nbytes=12_300_000, digest="0123456789abcdef", published=0.25, replicas=replicas)


def test_it_says_which_replicas_failed_and_why_and_what_each_phase_took() -> None:
    both, good, none = report(GOOD, BAD), report(GOOD), report()
    assert (both.failed, good.failed) == ({1: "the replica is DEAD"}, {})
    assert (both.seconds, good.seconds, none.seconds) == pytest.approx((0.25 + 0.25 + 3.0, 0.5 + 1.0 + 0.5, 0.25))
    table = both.to_pandas()
    assert (list(table["replica"]), list(table["version"]), list(table["paused"])) == ([0, 1], [3, 3], [0.5, 0.0])
    assert len(both.figure().axes[0].patches) == 6  # a bar for each phase
    assert [(row["replica"], row["phase"], row["start"], row["seconds"]) for row in both.timeline()] == [
        (-1, "publish", 0.0, 0.25),
        (0, "fetch", 0.25, 0.25),
        (0, "wait", 0.5, 1.0),
        (0, "pause", 1.5, 0.5),
        (1, "fetch", 0.25, 0.25),
        (1, "stage", 0.5, 3.0),
    ]


def test_printed_it_has_a_line_for_each_replica() -> None:
    first, head, *lines = str(report(GOOD, BAD)).splitlines()
    assert first == "SyncReport(version=3, replicas=1/2, 12.3 MB, 3.500 s, longest pause 0.500 s, digest=01234567)"
    times = [f"{name} (s)" for name in ("fetched", "staged", "waited", "paused", "loaded")]
    assert re.split("  +", head) == ["replica", *times, "tries", "outcome"]
    assert lines[0].split() == ["0", "0.250", "0.000", "1.000", "0.500", "0.125", "1", "ok"]
    assert lines[1].endswith("the replica is DEAD")
    unproved = replace(GOOD, unproved="no turn")
    lines = str(report(unproved, replace(unproved, replica=1))).splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == ["ok", "ok"]
    assert lines[4:] == ["replica 0, 1: not checked, no turn"]
    assert "replicas=0/0" in str(report())


def test_in_a_notebook_it_is_a_table_of_some_replicas_failures_first() -> None:
    nasty = replace(BAD, replica=40, error="<script>alert(1)</script>\n" + "x" * 1000)
    html = report(*(replace(GOOD, replica=index) for index in range(40)), nasty)._repr_html_()
    assert "<script" not in html and len(html) < 50_000
    read = TableReader(html)
    rows = read.rows["tbody"]
    assert len(rows) == 16
    assert rows[0][0] == "40" and rows[0][-1].startswith("<script>") and len(rows[0][-1]) == 200
    assert rows[1] == ["0", "0.250", "0.000", "1.000", "0.500", "0.125", "1", "ok"]
    assert read.other[0].startswith("SyncReport(version=3, replicas=40/41")
    assert read.other[1] == "and 25 more replicas"
    assert TableReader(report()._repr_html_()).rows["tbody"] == []
