"""The gloo transport: what is sent arrives, and a replica that dies or stalls fails alone. And names of transports."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
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
from torchrl_moe.store import Manifest, WeightStoreWriter
from torchrl_moe.store.content import header_of
from torchrl_moe.store.writer import version_path
from torchrl_moe.testing.fake_weights import FakeWeightReplica
from torchrl_moe.weight_update.transports import gloo
from torchrl_moe.weight_update.transports.base import StageOptions, rank_of
from torchrl_moe.weight_update.transports.gloo import (
    GlooGroup,
    GlooReceiver,
    GlooTransport,
    Meeting,
    MeetingPlace,
)
from torchrl_moe.weight_update.transports.registry import MemmapTransport, open_receiver, open_transport

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
        transport = open_transport("gloo", store.folder, **choices)
        assert isinstance(transport, GlooTransport)
        made.append((transport, FakeWeightReplica(workers=workers, expected=None)))
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
    assert (options["world_size"], options["rank_offset"], options["buffer_bytes"]) == (workers + 1, 1, buffer_bytes)
    staging = {"version": 3, "verify": "digest", "threads": 2, "manifest": manifest.to_json()}
    assert replica.told("stage_weights") == staging
    assert not torch.distributed.is_initialized()  # the default group is left alone


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
    ("how", "timeout", "error", "words"),
    [
        ("refuses", TIMEOUT, ManifestMismatch, "not my tensors"),
        ("stalls", 0.3, SyncTimeout, r"version 1 did not arrive within 0\.3 s: .*ready"),
        ("leaves in the middle", TIMEOUT, ReplicaDiedError, "the process ended"),  # its connection shows it
        ("leaves without a word", TIMEOUT, WeightSyncError, "version 1 was not sent"),
        ("reads no further", 1.0, SyncTimeout, "bytes were sent when the time was up"),  # only the clock shows it
    ],
)
def test_a_replica_that_fails_costs_only_its_own_version_and_can_be_met_again(
    store: WeightStoreWriter,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    timeout: float,
    error: Any,
    words: str,
) -> None:
    over = threading.Event()

    def stall(_: object) -> Exception:
        over.wait(TIMEOUT)
        return ReplicaDiedError("too late")

    transport, lost = bench(buffer_bytes=1 << 24)
    other = FakeWeightReplica(expected=None)
    for replica in (lost, other):
        transport.open(replica, TIMEOUT)
    if how == "leaves without a word":
        monkeypatch.setattr(gloo, "GRACE_SECONDS", 0.1)
        make_half(lost, lambda group: (group.close(), over.wait(TIMEOUT)))
    elif how == "refuses":
        lost.fail["stage_weights"] = always(ManifestMismatch("not my tensors"))
    elif how == "stalls":
        lost.fail["stage_weights"] = stall
    else:
        make_half(lost, leave if "leaves" in how else stall)
    manifest = store.publish(BIG.items(), 1)
    found = in_thread(lambda: transport.stage(other, manifest, StageOptions(), TIMEOUT))
    with pytest.raises(error, match=words):
        transport.stage(lost, manifest, StageOptions(), timeout)
    assert found.result(TIMEOUT).digest == manifest.digest
    over.set()
    lost.fail.clear()
    manifest = publish(store, 2)
    for replica in (lost, other):
        transport.stage(replica, manifest, StageOptions(), TIMEOUT)
        check_held(replica, manifest)
    assert (lost.asked["init_weights"], other.asked["init_weights"]) == (2, 1)  # it is met in a group of its own
    other.shutdown()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def held_here() -> tuple[int, int]:
    """How many threads this process has, and how many open files, sockets included."""
    gc.collect()
    return threads(), len(os.listdir("/proc/self/fd"))


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


def filled(store: WeightStoreWriter, version: int, size: int) -> Manifest:
    return store.publish([("w", torch.full((size,), float(version)))], version)


def test_the_buffer_is_kept_while_it_is_large_enough(store: WeightStoreWriter, bench: Bench) -> None:
    transport, replica = bench()
    places = []
    for version, size in ((1, 1000), (2, 500), (3, 1000), (4, 5000)):
        manifest = filled(store, version, size)
        transport.stage(replica, manifest, StageOptions(), TIMEOUT)
        with replica.receivers[0].reading(manifest) as tensors:
            assert torch.equal(tensors["w"], torch.full((size,), float(version)))
            places.append(tensors["w"].data_ptr())
    assert places[0] == places[1] == places[2] != places[3]


def test_a_version_is_not_overwritten_under_its_reader_and_one_of_its_number_is_another_one(
    store: WeightStoreWriter, bench: Bench
) -> None:
    transport, replica = bench()
    one = filled(store, 1, 1000)
    transport.stage(replica, one, StageOptions(), TIMEOUT)
    (receiver,) = replica.receivers
    with receiver.reading(one) as tensors:
        staging = in_thread(lambda: transport.stage(replica, filled(store, 2, 1000), StageOptions(), TIMEOUT))
        until(lambda: replica.asked["stage_weights"] == 2)
        time.sleep(0.05)
        assert not staging.done()
        assert torch.equal(tensors["w"], torch.ones(1000))
    staging.result(TIMEOUT)
    with pytest.raises(ManifestMismatch, match="version 1 was not received; version 2 was"), receiver.reading(one):
        pass
    again = store.publish([("w", torch.zeros(10))], 2)
    with pytest.raises(ManifestMismatch, match="version 2 was received again"), receiver.reading(again):
        pass


def test_a_trainer_that_never_comes_is_told_when_a_version_is_asked_for(place: MeetingPlace, tmp_path: Path) -> None:
    options = {"meeting": place.begin(), "world_size": 2, "buffer_bytes": 1000, "timeout_seconds": 0.3}
    receiver = GlooReceiver(options, 1)
    with pytest.raises(SyncTimeout, match="did not meet within"):
        receiver.fetch(filled(WeightStoreWriter(tmp_path), 1, 10), verify=True, threads=1)
    receiver.close()
    receiver.close()


# -- where ranks meet ------------------------------------------------------------------------------------------------
@pytest.fixture
def place() -> Iterator[MeetingPlace]:
    made = MeetingPlace()
    yield made
    made.close()


def test_several_ranks_that_do_not_come_cost_one_deadline_and_not_one_each(place: MeetingPlace) -> None:
    waits: list[int] = []
    with pytest.raises(SyncTimeout, match="the 3 ranks"):
        GlooGroup(place.meet(place.begin(), 0.0, lambda: waits.append(1)), 0, 3, 9.0)
    assert waits == [1]  # at the first rank that was missing, the time was up


def test_a_group_that_nobody_holds_any_more_ends(place: MeetingPlace) -> None:
    before, where = threads(), place.begin()
    group = GlooGroup(place.meet(where, TIMEOUT), 0, 1, TIMEOUT)
    assert threads() > before
    del group
    until(lambda: threads() <= before, TIMEOUT)
    assert not os.path.exists(where["folder"])


def test_a_group_that_was_not_made_leaves_no_socket_even_if_its_error_is_kept(place: MeetingPlace) -> None:
    """A log keeps errors, with their frames; a rank that has connected would wait for the open socket."""
    before = threads()
    with pytest.raises(SyncTimeout) as kept:
        GlooGroup(place.meet(place.begin(), 0.0), 0, 2, TIMEOUT)
    until(lambda: threads() <= before, TIMEOUT)
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("how", ["the meeting", "its place"])
def test_a_meeting_holds_values_and_who_is_late_for_one_that_is_over_hears_of_it_at_once(
    place: MeetingPlace, how: str
) -> None:
    where = place.begin()
    board, other = Meeting(where, TIMEOUT), Meeting(where, TIMEOUT)
    board.set("gloo/0/../1", b"first")  # whatever its key
    board.set("gloo/0/../1", b"second")
    assert (other.get("gloo/0/../1"), other.check(["gloo", "gloo/0/../1"])) == (b"second", False)
    place.close() if how == "its place" else place.end(where)
    uses = [lambda: board.set("key", b"value"), lambda: board.get("key")]
    uses += [lambda: board.check(["key"]), lambda: board.wait(["key"])]
    for use in uses:
        with pytest.raises(RuntimeError, match="the trainer has given the group up"):
            use()


def test_a_folder_that_is_not_here_is_another_hosts(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"is another host, and .* reaches one host: use transport='memmap'"):
        Meeting({"folder": str(tmp_path / "none")}, TIMEOUT)


# -- which transport a name stands for --------------------------------------------------------------------------------
def test_a_name_that_no_transport_has_is_refused_on_both_sides(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown transport 'pigeon'; there are 'memmap', 'adapter', 'gloo' and 'nc"):
        open_transport("pigeon", tmp_path)
    with pytest.raises(ValueError, match="unknown transport 'pigeon'; the worker has 'memmap', 'gloo'"):
        open_receiver("pigeon", {})
    with pytest.raises(TypeError, match="port"):
        open_receiver("memmap", {"folder": str(tmp_path), "port": 1})
    shared = open_transport("memmap", tmp_path / "a", tmp_path / "b")  # as the engines see it
    assert isinstance(shared, MemmapTransport) and shared.folder == tmp_path / "b"


@pytest.mark.parametrize(
    ("replica", "per_replica", "worker", "offset", "rank"), [(0, 1, 0, 1, 1), (0, 4, 3, 1, 4), (1, 2, 1, 5, 8)]
)
def test_ranks_count_the_workers_behind_the_offset(
    replica: int, per_replica: int, worker: int, offset: int, rank: int
) -> None:
    config = SimpleNamespace(data_parallel_index=replica, world_size=per_replica, rank=worker)
    assert rank_of(config, offset) == rank
