"""How a replica prepares a version, whatever the transport, and which rank a worker has."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe.weight_update.store import Manifest
from torchrl_moe.weight_update.transports.base import StageOptions, asked, rank_of, workers_of


def test_a_version_is_verified_in_one_thread_by_default() -> None:
    assert StageOptions() == StageOptions(verify="digest", threads=1)


@pytest.mark.parametrize(
    ("replica", "per_replica", "worker", "offset", "rank"),
    [(0, 1, 0, 1, 1), (0, 4, 3, 1, 4), (1, 2, 1, 5, 8), (3, 6, 5, 1, 24)],
)
def test_ranks_count_the_workers_behind_the_offset(
    replica: int, per_replica: int, worker: int, offset: int, rank: int
) -> None:
    config = SimpleNamespace(data_parallel_index=replica, world_size=per_replica, rank=worker)
    assert rank_of(config, offset) == rank


def test_workers_are_counted_over_all_kinds_of_ranks() -> None:
    info = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=4)
    assert workers_of(info) == 24


def test_a_replica_is_asked_in_a_thread_with_all_that_it_must_know() -> None:
    manifest, told = Manifest(version=3, slot=0, entries=()), []

    def stage_weights(version: int, **how: Any) -> str:
        told.append((version, how, threading.current_thread().name))
        return "prepared"

    replica: Any = SimpleNamespace(stage_weights=stage_weights)
    with asked(replica, manifest, StageOptions(threads=2), 9.0) as answer:
        assert answer.result(20.0) == "prepared"
    how = {"verify": "digest", "threads": 2, "manifest": manifest.to_json(), "timeout": 9.0}
    assert told == [(3, how, "weight-stage_0")]
