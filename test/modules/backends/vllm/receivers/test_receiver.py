"""Which name stands for which receiver, and which rank a worker has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from torchrl_moe.data.gloo_group import GlooGroup, open_rendezvous
from torchrl_moe.modules.backends.vllm.receivers.gloo import GlooReceiver
from torchrl_moe.modules.backends.vllm.receivers.memmap import MemmapReceiver
from torchrl_moe.modules.backends.vllm.receivers.receiver import open_receiver, rank_of


def test_a_transport_is_opened_by_its_name(tmp_path: Path) -> None:
    assert isinstance(open_receiver("memmap", {"folder": str(tmp_path)}), MemmapReceiver)


def test_a_worker_joins_the_trainers_group_under_its_rank() -> None:
    store = open_rendezvous("127.0.0.1", 20.0)
    options = {"address": "127.0.0.1", "port": store.port, "world_size": 2, "rank_offset": 1}
    worker = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0))
    receiver = open_receiver("gloo", {**options, "timeout_seconds": 20.0, "bucket_bytes": 9}, worker)
    assert isinstance(receiver, GlooReceiver)
    GlooGroup(store, 0, 2, 20.0).close()  # a wrong rank would not let it come about
    receiver.close()


@pytest.mark.parametrize(
    ("replica", "per_replica", "worker", "offset", "rank"), [(0, 1, 0, 1, 1), (0, 4, 3, 1, 4), (1, 2, 1, 5, 8)]
)
def test_ranks_count_the_workers_behind_the_offset(
    replica: int, per_replica: int, worker: int, offset: int, rank: int
) -> None:
    config = SimpleNamespace(data_parallel_index=replica, world_size=per_replica, rank=worker)
    assert rank_of(config, offset) == rank


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown transport 'carrier pigeon'; the worker has 'memmap', 'gloo' and"):
        open_receiver("carrier pigeon", {})


def test_other_options_than_its_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="port"):
        open_receiver("memmap", {"folder": str(tmp_path), "port": 1})
