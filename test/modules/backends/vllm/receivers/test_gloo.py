"""The worker's end of gloo: what it holds, and when. ``weight_update/transports/test_gloo.py`` has whole transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.waiting import until
from torchrl_moe._errors import ManifestMismatch, SyncTimeout
from torchrl_moe.data.gloo_group import GlooGroup, open_rendezvous
from torchrl_moe.data.weight_store import Manifest, WeightStoreReader, WeightStoreWriter
from torchrl_moe.modules.backends.vllm.receivers.gloo import GlooReceiver

TIMEOUT = 20.0


class Bench:
    """One receiver, and the trainer's rank to send to it by hand."""

    def __init__(self, folder: Path, timeout: float = TIMEOUT) -> None:
        self.store, self.reader = WeightStoreWriter(folder), WeightStoreReader(folder)
        self.rendezvous = open_rendezvous("127.0.0.1", TIMEOUT)
        options = {"address": "127.0.0.1", "port": self.rendezvous.port, "world_size": 2, "bucket_bytes": 1000}
        self.pool = ThreadPoolExecutor(1)
        self.receiver = GlooReceiver({**options, "timeout_seconds": timeout}, 1)

    def meet(self) -> None:
        self.group = GlooGroup(self.rendezvous, 0, 2, TIMEOUT, 1000)

    def publish(self, version: int, size: int) -> Manifest:
        return self.store.publish([("w", torch.full((size,), float(version)))], version)

    def send(self, manifest: Manifest) -> None:
        until(self.group.all_ready, TIMEOUT)
        with self.reader.flat(manifest) as flat:
            self.group.broadcast(torch.from_numpy(flat.copy()), time.monotonic() + TIMEOUT, lambda _: None)

    def fetch(self, manifest: Manifest) -> Future[None]:
        return self.pool.submit(self.receiver.fetch, manifest, verify=True, threads=1)

    def hold(self, manifest: Manifest) -> None:
        fetching = self.fetch(manifest)
        self.send(manifest)
        fetching.result(TIMEOUT)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.receiver.close()


def test_nothing_is_there_before_it_arrived(bench: Bench) -> None:
    bench.meet()
    manifest = bench.publish(1, 10)
    fetching = bench.fetch(manifest)
    until(bench.group.all_ready, TIMEOUT)
    with pytest.raises(ManifestMismatch, match="version 1 was not received; no version was"):
        bench.receiver.manifest(1)
    bench.send(manifest)
    fetching.result(TIMEOUT)
    assert bench.receiver.manifest(1) == manifest
    with pytest.raises(ManifestMismatch, match="version 2 was not received; version 1 was"):
        bench.receiver.manifest(2)


def test_the_buffer_is_kept_while_it_is_large_enough(bench: Bench) -> None:
    bench.meet()
    places = []
    for version, size in ((1, 1000), (2, 500), (3, 1000), (4, 5000)):
        manifest = bench.publish(version, size)
        bench.hold(manifest)
        with bench.receiver.reading(manifest) as tensors:
            assert torch.equal(tensors["w"], torch.full((size,), float(version)))
            places.append(tensors["w"].data_ptr())
    assert places[0] == places[1] == places[2] != places[3]


def test_a_version_is_not_overwritten_under_its_reader(bench: Bench) -> None:
    bench.meet()
    one = bench.publish(1, 1000)
    bench.hold(one)
    two = bench.publish(2, 1000)
    with bench.receiver.reading(one) as tensors:
        fetching = bench.fetch(two)
        sending = threading.Thread(target=bench.send, args=(two,))
        sending.start()
        time.sleep(0.05)
        assert not bench.group.all_ready()
        assert torch.equal(tensors["w"], torch.ones(1000))
    fetching.result(TIMEOUT)
    sending.join(TIMEOUT)
    with pytest.raises(ManifestMismatch), bench.receiver.reading(one):
        pass


def test_a_version_that_was_published_again_is_another_one(bench: Bench) -> None:
    bench.meet()
    one = bench.publish(1, 10)
    bench.hold(one)
    again = bench.store.publish([("w", torch.zeros(10))], 1)
    with pytest.raises(ManifestMismatch, match="version 1 was received again"), bench.receiver.reading(again):
        pass


def test_a_trainer_that_never_comes_is_told_when_a_version_is_asked_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, timeout=0.3)
    with pytest.raises(SyncTimeout, match="did not meet within"):
        bench.fetch(bench.publish(1, 10)).result(TIMEOUT)
    bench.receiver.close()
    bench.receiver.close()
