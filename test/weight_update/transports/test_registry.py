"""Which transport a name stands for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe.testing.fake_weights import FakeWeightReplica
from torchrl_moe.weight_update.transports.gloo import BUFFER_BYTES, GlooGroup, GlooReceiver, GlooTransport, MeetingPlace
from torchrl_moe.weight_update.transports.registry import MemmapReceiver, MemmapTransport, open_receiver, open_transport


def test_memmap_has_the_folder_as_the_engines_see_it(tmp_path: Path) -> None:
    transport = open_transport("memmap", tmp_path / "a", tmp_path / "b")
    assert isinstance(transport, MemmapTransport) and transport.folder == tmp_path / "b"
    assert isinstance(open_receiver("memmap", {"folder": str(tmp_path)}), MemmapReceiver)


def test_adapters_lie_in_the_same_folder_and_replicas_learn_what_they_are(tmp_path: Path) -> None:
    replica = FakeWeightReplica()
    open_transport("adapter", tmp_path).open(replica, 5.0)
    assert (replica.reader, replica._adapters) == (None, tmp_path)


@pytest.mark.parametrize(
    ("given", "buffer_bytes"),
    [({}, BUFFER_BYTES), ({"device": None}, BUFFER_BYTES), ({"device": "cpu"}, BUFFER_BYTES), ({"buffer_bytes": 9}, 9)],
)
def test_gloo_gets_what_is_given_and_its_own_defaults(given: dict[str, Any], buffer_bytes: int, tmp_path: Path) -> None:
    transport = open_transport("gloo", tmp_path, **given)
    assert isinstance(transport, GlooTransport)
    assert (transport._reader.folder, transport._buffer_bytes) == (tmp_path, buffer_bytes)
    transport.close()


def test_gloo_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="buffer_bytes must be at least 1, got 0"):
        open_transport("gloo", tmp_path, buffer_bytes=0)
    with pytest.raises(ValueError, match="device='cuda:1': transport='gloo' sends from the CPU"):
        open_transport("gloo", tmp_path, device="cuda:1")


def test_an_unknown_transport_and_other_options_than_its_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown transport 'carrier pigeon'; there are 'memmap', 'adapter'"):
        open_transport("carrier pigeon", tmp_path)
    with pytest.raises(ValueError, match="unknown transport 'carrier pigeon'; the worker has 'memmap' and 'gloo'"):
        open_receiver("carrier pigeon", {})
    with pytest.raises(TypeError, match="port"):
        open_receiver("memmap", {"folder": str(tmp_path), "port": 1})


def test_a_worker_joins_the_trainers_group_under_its_rank(place: MeetingPlace) -> None:
    where = place.begin()
    options = {"meeting": where, "world_size": 2, "rank_offset": 1, "timeout_seconds": 20.0, "buffer_bytes": 9}
    worker = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0))
    receiver = open_receiver("gloo", options, worker)
    assert isinstance(receiver, GlooReceiver)
    GlooGroup(place.meet(where, 20.0), 0, 2, 20.0).close()  # with a wrong rank it could not be made
    receiver.close()
