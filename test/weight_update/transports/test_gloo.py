"""The gloo transport: what is sent arrives, and a replica that dies or stalls fails alone."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.waiting import in_thread, until
from support.weights import always
from torchrl_moe.errors import DigestMismatch, ManifestMismatch, ReplicaDiedError, SyncTimeout, WeightSyncError
from torchrl_moe.store import Manifest, WeightStoreReader, WeightStoreWriter
from torchrl_moe.store.content import header_of
from torchrl_moe.store.writer import version_path
from torchrl_moe.testing.fake_weights import FakeWeightReplica
from torchrl_moe.weight_update.transports import gloo
from torchrl_moe.weight_update.transports.base import StageOptions
from torchrl_moe.weight_update.transports.gloo import GlooGroup, GlooReceiver, GlooTransport, MeetingPlace

TIMEOUT = 20.0
TENSORS = {
    "a.weight": torch.arange(3000, dtype=torch.float32).view(30, 100),
    "b.bias": torch.linspace(-1, 1, 7, dtype=torch.bfloat16),
    "c.count": torch.tensor([5], dtype=torch.int64),
    "d.none": torch.empty(0, 4),
    "e.scale": torch.tensor(0.5, dtype=torch.bfloat16),
}
BIG = {"w": torch.zeros(1 << 26, dtype=torch.uint8)}  # more than the sockets hold
SIZES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStoreWriter]:
    made = WeightStoreWriter(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture
def bench(store: WeightStoreWriter) -> Iterator[Callable[..., tuple[GlooTransport, FakeWeightReplica]]]:
    made: list[tuple[GlooTransport, FakeWeightReplica]] = []

    def make(workers: int = 1, **choices: Any) -> tuple[GlooTransport, FakeWeightReplica]:
        made.append((GlooTransport(store.folder, **choices), FakeWeightReplica(workers=workers, expected=None)))
        return made[-1]

    yield make
    for transport, replica in made:
        transport.close()
        replica.shutdown()


Bench = Callable[..., tuple[GlooTransport, FakeWeightReplica]]


def check_held(replica: FakeWeightReplica, manifest: Manifest, scale: int = 1) -> None:
    for receiver in replica.receivers:
        with receiver.reading(receiver.manifest(manifest.version)) as tensors:
            assert list(tensors) == list(TENSORS)
            for name, tensor in TENSORS.items():
                assert tensors[name].dtype == tensor.dtype
                assert torch.equal(tensors[name], tensor * scale)


def publish(store: WeightStoreWriter, version: int, scale: int = 1) -> Manifest:
    return store.publish([(name, tensor * scale) for name, tensor in TENSORS.items()], version)


@pytest.mark.parametrize("buffer_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_has_the_published_tensors_version_after_version(
    store: WeightStoreWriter, bench: Bench, workers: int, buffer_bytes: int
) -> None:
    transport, replica = bench(workers, buffer_bytes=buffer_bytes)
    transport.open(replica, TIMEOUT)
    for version in (1, 2, 3):
        manifest = publish(store, version, version)
        report = transport.stage(replica, manifest, StageOptions(threads=2), TIMEOUT)
        assert (report.nbytes, report.digest) == (manifest.nbytes, manifest.digest)
        check_held(replica, manifest, version)
    assert replica.asked["init_weights"] == 1
    options = replica.told("init_weights")["options"]
    assert (options["world_size"], options["rank_offset"]) == (workers + 1, 1)
    staging = {"version": 3, "verify": "digest", "threads": 2, "manifest": manifest.to_json()}
    assert replica.told("stage_weights") == staging


def test_on_one_host_ranks_meet_in_a_closed_folder_and_nothing_listens_beyond_loopback(bench: Bench) -> None:
    before = listening()
    transport, replica = bench()
    transport.open(replica, TIMEOUT)
    where = replica.told("init_weights")["options"]["meeting"]
    assert set(where) == {"folder"}
    folder = Path(where["folder"]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {place.split(":")[0] for place in listening() - before} <= {"0100007F"}  # gloo's own: 127.0.0.1
    transport.close()
    assert not folder.exists()


def listening() -> set[str]:
    """Where processes of this network listen, as the kernel writes it."""
    tables = (Path(f"/proc/self/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6"))
    return {line.split()[1] for table in tables for line in table if line.split()[3] == "0A"}


def test_a_refusal_is_the_answer_at_once_and_the_next_version_arrives(store: WeightStoreWriter, bench: Bench) -> None:
    transport, replica = bench()
    replica.fail["stage_weights"] = always(ManifestMismatch("not my tensors"))
    transport.open(replica, TIMEOUT)
    started = time.monotonic()
    with pytest.raises(ManifestMismatch, match="not my tensors"):
        transport.stage(replica, publish(store, 1), StageOptions(), TIMEOUT)
    assert time.monotonic() - started < TIMEOUT / 2
    replica.fail.clear()
    manifest = publish(store, 2)
    transport.stage(replica, manifest, StageOptions(), TIMEOUT)
    check_held(replica, manifest)
    assert replica.asked["init_weights"] == 2  # in a group of its own


def test_a_replica_that_stalls_is_given_up_and_can_be_met_again(store: WeightStoreWriter, bench: Bench) -> None:
    awake = threading.Event()

    def stall(asked: int) -> Exception:
        awake.wait(TIMEOUT)
        return ReplicaDiedError("too late")

    transport, replica = bench()
    replica.fail["stage_weights"] = stall
    transport.open(replica, TIMEOUT)
    with pytest.raises(SyncTimeout, match=r"version 1 did not arrive within 0\.3 s: .*ready"):
        transport.stage(replica, publish(store, 1), StageOptions(), 0.3)
    awake.set()
    replica.fail.clear()
    manifest = publish(store, 2)
    transport.stage(replica, manifest, StageOptions(), TIMEOUT)
    check_held(replica, manifest)


class HalfReader(GlooReceiver):
    """Announces that it will read, and does something else."""

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        group = self._group.result()
        group.announce()
        self.act(group)  # type: ignore[attr-defined]


def leave(group: Any) -> None:
    group.close()
    raise ReplicaDiedError("the process ended")


def make_half(replica: FakeWeightReplica, act: Callable[[Any], None] = leave) -> None:
    receiver: Any = replica.receivers[0]
    receiver.__class__, receiver.act = HalfReader, act


@pytest.mark.parametrize(
    ("timeout", "error", "words"),
    [(TIMEOUT, ReplicaDiedError, "the process ended"), (1.0, SyncTimeout, "bytes were sent when the time was up")],
)
def test_a_replica_that_is_lost_in_the_middle_costs_only_its_own_version(
    store: WeightStoreWriter, bench: Bench, timeout: float, error: Any, words: str
) -> None:
    """It goes away, which its connection shows; or it does not read on, which only the clock does."""
    stopped = threading.Event()
    transport, lost = bench(buffer_bytes=1 << 24)
    other = FakeWeightReplica(expected=None)
    for replica in (lost, other):
        transport.open(replica, TIMEOUT)
    make_half(lost, leave if error is ReplicaDiedError else lambda group: stopped.wait(TIMEOUT))
    manifest = store.publish(BIG.items(), 1)
    found = in_thread(lambda: transport.stage(other, manifest, StageOptions(), TIMEOUT))
    with pytest.raises(error, match=words):
        transport.stage(lost, manifest, StageOptions(), timeout)
    assert found.result(TIMEOUT).digest == manifest.digest
    stopped.set()
    manifest = publish(store, 2)
    for replica in (lost, other):
        transport.stage(replica, manifest, StageOptions(), TIMEOUT)
        check_held(replica, manifest)
    assert (lost.asked["init_weights"], other.asked["init_weights"]) == (2, 1)
    other.shutdown()


def held_here() -> tuple[int, int]:
    """How many threads this process has, and how many open files, sockets included."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("when", ["between", "meeting", "transfer"])
def test_replicas_that_die_and_are_restarted_ten_times_leave_nothing_behind(
    store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    transport = GlooTransport(store.folder, buffer_bytes=1000)
    stays, last = (FakeWeightReplica(expected=None) for _ in range(2))
    for version in (1, 2):  # each opens a slot
        manifest = publish(store, version)
        transport.stage(stays, manifest, StageOptions(), TIMEOUT)
        transport.stage(last, manifest, StageOptions(), TIMEOUT)
    place = Path(stays.told("init_weights")["options"]["meeting"]["folder"]).parent
    before = held_here()
    for version in range(3, 13):
        last.die()
        last = FakeWeightReplica(workers=0 if when == "meeting" else 1, expected=None)
        if when == "meeting":  # its workers never come, and then its process is gone
            last.wait_ready = lambda timeout: SimpleNamespace(**SIZES)  # type: ignore[method-assign]
            monkeypatch.setattr(last, "is_alive", lambda: False)
            with pytest.raises(ReplicaDiedError, match="ended before its workers joined"):
                transport.open(last, TIMEOUT)
            continue
        transport.open(last, TIMEOUT)
        manifest = publish(store, version, version)
        transport.stage(stays, manifest, StageOptions(), TIMEOUT)
        if when == "transfer":
            make_half(last)
            with pytest.raises(ReplicaDiedError):
                transport.stage(last, manifest, StageOptions(), TIMEOUT)
    # fewer, where the last one died too, or a test before this one left something that has ended meanwhile
    until(lambda: all(now <= then for now, then in zip(held_here(), before, strict=True)), TIMEOUT)
    assert len(list(place.iterdir())) <= 2
    manifest = publish(store, 30)
    transport.stage(stays, manifest, StageOptions(), TIMEOUT)
    check_held(stays, manifest)
    transport.close()
    stays.shutdown()
    last.shutdown()


def test_what_a_gone_peer_did_not_explain_is_a_sync_error(
    store: WeightStoreWriter, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "GRACE_SECONDS", 0.1)
    silent = threading.Event()
    transport, replica = bench()
    transport.open(replica, TIMEOUT)
    make_half(replica, lambda group: (group.close(), silent.wait(TIMEOUT)))
    with pytest.raises(WeightSyncError, match="version 1 was not sent"):
        transport.stage(replica, store.publish(BIG.items(), 1), StageOptions(), TIMEOUT)
    silent.set()


@pytest.mark.parametrize("verify", ["digest", "off"])
def test_bytes_that_changed_on_the_way_are_found_where_digests_are_asked_for(
    store: WeightStoreWriter, bench: Bench, verify: Any
) -> None:
    transport, replica = bench()
    manifest = publish(store, 1)
    file = np.memmap(version_path(store.folder, 1), np.uint8, "r+")
    file[len(header_of(manifest)) + manifest.entries[1].offset] ^= 1
    refused = pytest.raises(DigestMismatch, match=r"version 1: bytes of b\.bias are not those published")
    with nullcontext() if verify == "off" else refused:
        transport.stage(replica, manifest, StageOptions(verify=verify), TIMEOUT)
    if verify == "digest":
        with pytest.raises(ManifestMismatch, match="version 1 was not received; no version was"):
            replica.receivers[0].manifest(1)


def test_workers_that_do_not_come_are_a_timeout(bench: Bench) -> None:
    transport, replica = bench(workers=0)
    replica.wait_ready = lambda timeout: SimpleNamespace(**SIZES)  # type: ignore[method-assign]
    with pytest.raises(SyncTimeout, match=r"the 2 ranks of a gloo group did not meet within 0\.3 s"):
        transport.open(replica, 0.3)


class Hand:
    """One receiver, and the trainer's rank to send to it by hand."""

    def __init__(self, folder: Path, timeout: float = TIMEOUT) -> None:
        self.store, self.reader = WeightStoreWriter(folder), WeightStoreReader(folder)
        self.place = MeetingPlace()
        self.where = self.place.begin()
        options = {"meeting": self.where, "world_size": 2, "buffer_bytes": 1000}
        self.pool = ThreadPoolExecutor(1)
        self.receiver = GlooReceiver({**options, "timeout_seconds": timeout}, 1)

    def meet(self) -> None:
        self.group = GlooGroup(self.place.meet(self.where, TIMEOUT), 0, 2, TIMEOUT, 1000)

    def publish(self, version: int, size: int) -> Manifest:
        return self.store.publish([("w", torch.full((size,), float(version)))], version)

    def send(self, manifest: Manifest) -> None:
        until(self.group.all_ready, TIMEOUT)
        with self.reader.flat(manifest) as (_, flat):
            self.group.broadcast(torch.from_numpy(flat.copy()), time.monotonic() + TIMEOUT, lambda _: None)

    def fetch(self, manifest: Manifest) -> Future[None]:
        return self.pool.submit(self.receiver.fetch, manifest, verify=True, threads=1)

    def hold(self, manifest: Manifest) -> None:
        fetching = self.fetch(manifest)
        self.send(manifest)
        fetching.result(TIMEOUT)


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    made = Hand(tmp_path)
    yield made
    made.receiver.close()
    made.place.close()


def test_nothing_is_there_before_it_arrived(hand: Hand) -> None:
    hand.meet()
    manifest = hand.publish(1, 10)
    fetching = hand.fetch(manifest)
    until(hand.group.all_ready, TIMEOUT)
    with pytest.raises(ManifestMismatch, match="version 1 was not received; no version was"):
        hand.receiver.manifest(1)
    hand.send(manifest)
    fetching.result(TIMEOUT)
    assert hand.receiver.manifest(1) == manifest
    with pytest.raises(ManifestMismatch, match="version 2 was not received; version 1 was"):
        hand.receiver.manifest(2)


def test_the_buffer_is_kept_while_it_is_large_enough(hand: Hand) -> None:
    hand.meet()
    places = []
    for version, size in ((1, 1000), (2, 500), (3, 1000), (4, 5000)):
        manifest = hand.publish(version, size)
        hand.hold(manifest)
        with hand.receiver.reading(manifest) as tensors:
            assert torch.equal(tensors["w"], torch.full((size,), float(version)))
            places.append(tensors["w"].data_ptr())
    assert places[0] == places[1] == places[2] != places[3]


def test_a_version_is_not_overwritten_under_its_reader(hand: Hand) -> None:
    hand.meet()
    one = hand.publish(1, 1000)
    hand.hold(one)
    two = hand.publish(2, 1000)
    with hand.receiver.reading(one) as tensors:
        fetching, sending = hand.fetch(two), in_thread(lambda: hand.send(two))
        time.sleep(0.05)
        assert not hand.group.all_ready()
        assert torch.equal(tensors["w"], torch.ones(1000))
    fetching.result(TIMEOUT)
    sending.result(TIMEOUT)
    with pytest.raises(ManifestMismatch), hand.receiver.reading(one):
        pass


def test_a_version_that_was_published_again_is_another_one(hand: Hand) -> None:
    hand.meet()
    one = hand.publish(1, 10)
    hand.hold(one)
    again = hand.store.publish([("w", torch.zeros(10))], 1)
    with pytest.raises(ManifestMismatch, match="version 1 was received again"), hand.receiver.reading(again):
        pass


def test_a_trainer_that_never_comes_is_told_when_a_version_is_asked_for(tmp_path: Path) -> None:
    hand = Hand(tmp_path, timeout=0.3)
    with pytest.raises(SyncTimeout, match="did not meet within"):
        hand.fetch(hand.publish(1, 10)).result(TIMEOUT)
    hand.receiver.close()
    hand.receiver.close()
