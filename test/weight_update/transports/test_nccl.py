"""The nccl transport: both ends over communicators in memory; and over two GPUs, that bytes arrive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from support.nccl_fakes import FakeGroup, FakeModel, GpuReplica
from support.waiting import PATIENCE, in_thread, until
from torchrl_moe._errors import DigestMismatch, ManifestMismatch, ReplicaDiedError, SyncTimeout, WeightSyncError
from torchrl_moe.weight_update.store import Manifest, WeightStoreWriter
from torchrl_moe.weight_update.transports import nccl
from torchrl_moe.weight_update.transports.base import StageOptions
from torchrl_moe.weight_update.transports.nccl import NcclReceiver, NcclTransport
from torchrl_moe.weight_update.transports.nccl_group import Transfer
from torchrl_moe.weight_update.transports.registry import open_receiver

SECONDS = 30.0  # what a busy machine may take
SENT = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.ones(70, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "scale": torch.tensor(0.5),
    "none": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
}
MANY = {"a": torch.zeros(32), **{f"more.{number}": torch.ones(32) for number in range(20)}}
"""Each is a chunk of its own."""


@pytest.fixture
def transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclTransport]:
    FakeGroup.made = []
    ids = iter(range(100))
    monkeypatch.setattr(nccl, "NcclGroup", FakeGroup)
    monkeypatch.setattr(nccl, "new_unique_id", lambda: bytes([next(ids)]) * 128)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = NcclTransport(tmp_path, device="cpu", buffer_bytes=128)
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStoreWriter]:
    made = WeightStoreWriter(tmp_path)
    yield made
    made.close()


def of_trainer() -> list[FakeGroup]:
    return [group for group in FakeGroup.made if group.rank == 0]


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weight-sender"]


def boards(transport: NcclTransport) -> list[Path]:
    assert transport._place._folder is not None
    return list(Path(transport._place._folder).iterdir())


def same(model: FakeModel, sent: dict[str, Tensor]) -> bool:
    return model.loaded.keys() == sent.keys() and all(
        torch.equal(model.loaded[name], tensor) and model.loaded[name].dtype == tensor.dtype
        for name, tensor in sent.items()
    )


def moved(sent: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other values of the same kinds."""
    return {name: ~tensor if tensor.dtype is torch.bool else tensor + 1 for name, tensor in sent.items()}


# -- what is sent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_buffers", [1, 2, 5])
def test_all_tensors_arrive_in_all_workers_those_without_dimensions_included(
    num_buffers: int, transport: NcclTransport, store: WeightStoreWriter
) -> None:
    transport._buffers = 128, num_buffers
    replica = GpuReplica(workers=2)
    for version, sent in [(1, SENT), (2, moved(SENT))]:
        manifest = store.publish(sent.items(), version)
        assert transport.stage(replica, manifest, StageOptions(verify="digest"), SECONDS).digest == f"of {version}"
        assert replica.load(manifest) == [6, 6]
        assert all(same(model, sent) for model in replica.models)
    assert len(of_trainer()) == 1


def test_every_worker_of_every_data_parallel_rank_is_in_the_group(
    transport: NcclTransport, store: WeightStoreWriter
) -> None:
    replica = GpuReplica(workers=2, data_parallel=3)
    manifest = store.publish(SENT.items(), 1)
    transport.stage(replica, manifest, StageOptions(), SECONDS)
    assert sorted((group.rank, group.world_size) for group in FakeGroup.made) == [(rank, 7) for rank in range(7)]
    assert replica.load(manifest) == [6] * 6


def test_the_bytes_that_arrive_are_compared_with_those_published_and_a_second_try_may_do(
    transport: NcclTransport, store: WeightStoreWriter
) -> None:
    replica, manifest = GpuReplica(workers=1), store.publish(SENT.items(), 1)
    transport.stage(replica, manifest, StageOptions(verify="digest"), SECONDS)
    (worker,) = [group for group in FakeGroup.made if group.rank == 1]
    worker.spoil = lambda flat: flat ^ 1
    with pytest.raises(DigestMismatch, match="version 1: bytes of a are not those published"):
        replica.load(manifest)
    worker.spoil = lambda flat: flat
    assert replica.load(manifest) == [6]
    assert same(replica.models[0], SENT)
    transport.stage(replica, manifest, StageOptions(verify="off"), SECONDS)
    worker.spoil = lambda flat: flat ^ 1
    assert replica.load(manifest) == [6]  # nobody looks
    assert not same(replica.models[0], SENT)


def test_a_model_that_refuses_a_tensor_leaves_the_group_good_for_another_try(
    transport: NcclTransport, store: WeightStoreWriter
) -> None:
    replica, manifest = GpuReplica(workers=2), store.publish(SENT.items(), 1)
    transport.stage(replica, manifest, StageOptions(), SECONDS)

    def refuse(name: str) -> None:
        if name == "count":
            raise KeyError(name)

    replica.models[1].take = refuse
    with pytest.raises(KeyError, match="count"):
        replica.load(manifest)
    replica.models[1].take = lambda name: None
    assert replica.load(manifest) == [6, 6]
    assert len(of_trainer()) == 1


# -- failures that end -------------------------------------------------------------------------------------------------


def dies_in_a_transfer(replica: GpuReplica, manifest: Manifest, released: threading.Event) -> None:
    """Have a replica die when one of its workers has taken one tensor; that worker's thread is gone as its process."""
    dead = threading.Event()

    def die(name: str) -> None:
        if name != "a":
            dead.set()
            _wait(released)

    replica.models[0].take = die
    for receiver in replica.ends:
        threading.Thread(target=_forget_errors, args=(receiver, manifest), daemon=True).start()
    until(dead.is_set)
    replica.die()


def _forget_errors(receiver: NcclReceiver, manifest: Manifest) -> None:
    try:
        receiver.load(manifest)
    except WeightSyncError as error:
        assert "gave" in str(error) or "left" in str(error)  # in a thread that stands for a process


def test_a_replica_that_dies_in_a_transfer_blocks_neither_the_others_nor_later_versions(
    transport: NcclTransport, store: WeightStoreWriter
) -> None:
    dying, other, released = GpuReplica(workers=2), GpuReplica(workers=1), threading.Event()
    manifest = store.publish(MANY.items(), 1)
    for replica in (dying, other):
        transport.stage(replica, manifest, StageOptions(), SECONDS)
    group, _ = of_trainer()
    dies_in_a_transfer(dying, manifest, released)
    assert other.load(manifest) == [21]
    until(group.aborted.is_set)
    assert len(group.sent) < 21  # in the middle
    other.models[0].loaded.clear()
    again = GpuReplica(workers=2)  # restarted
    for version, sent in [(2, SENT), (3, moved(SENT))]:
        manifest = store.publish(sent.items(), version)
        for replica in (again, other):
            transport.stage(replica, manifest, StageOptions(), SECONDS)
            assert replica.load(manifest) == [6] * len(replica.models)
            assert all(same(model, sent) for model in replica.models)
    released.set()


def test_a_worker_that_stalls_costs_its_own_group_a_deadline_and_is_met_again(
    transport: NcclTransport, store: WeightStoreWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    replica, released = GpuReplica(workers=2), threading.Event()
    manifest = store.publish(MANY.items(), 1)
    transport.stage(replica, manifest, StageOptions(), SECONDS)
    transport._links[replica].offer(manifest, 0.2)
    replica.models[0].take = lambda name: None if name == "a" else _wait(released)
    stalled = in_thread(lambda: replica.ends[0].load(manifest))
    with pytest.raises(WeightSyncError, match="version 1 did not arrive: the trainer left"):
        replica.ends[1].load(manifest)
    assert "SyncTimeout: version 1 was not sent: the time is up" in capsys.readouterr().err
    released.set()
    with pytest.raises(WeightSyncError):
        stalled.result(SECONDS)
    replica.models[0].take = lambda name: None
    transport.stage(replica, manifest, StageOptions(), SECONDS)
    assert replica.load(manifest) == [21, 21]
    first, second = of_trainer()
    assert (first.aborted.is_set(), second.aborted.is_set()) == (True, False)


def _wait(released: threading.Event) -> None:
    assert released.wait(PATIENCE)


def test_a_worker_that_waits_for_a_trainer_that_left_is_woken(
    transport: NcclTransport, store: WeightStoreWriter
) -> None:
    replica = GpuReplica(workers=1)
    transport.open(replica, SECONDS)  # nothing is offered: nobody sends
    loading = in_thread(lambda: replica.ends[0].load(store.publish(SENT.items(), 1)))
    transport.close()
    with pytest.raises(WeightSyncError, match="version 1 did not arrive: the trainer left"):
        loading.result(SECONDS)
    assert all(group.aborted.is_set() for group in FakeGroup.made)


def test_workers_that_do_not_come_cost_a_deadline_of_ours(transport: NcclTransport) -> None:
    replica = GpuReplica(workers=2)
    replica.command_init_weights = lambda **_: _wait(released)  # type: ignore[method-assign]
    released = threading.Event()
    with pytest.raises(SyncTimeout, match="the 3 ranks of a NCCL group did not meet: the time is up"):
        transport.open(replica, 0.1)
    released.set()
    assert boards(transport) == []
    assert FakeGroup.made == []  # NCCL, which knows no deadline, was not asked


def test_a_replica_that_refuses_or_dies_at_the_meeting_says_so_at_once(transport: NcclTransport) -> None:
    replica = GpuReplica()
    replica.fail["init_weights"] = lambda asked: ReplicaDiedError("replica 0 died: at the meeting")
    with pytest.raises(ReplicaDiedError, match="at the meeting"):
        transport.open(replica, 3600.0)
    assert FakeGroup.made == []


def test_nothing_is_left_of_replicas_that_are_restarted(transport: NcclTransport, store: WeightStoreWriter) -> None:
    manifest = store.publish(SENT.items(), 1)
    replica, before = GpuReplica(workers=1), len(senders())
    for _ in range(5):  # met again, the same object
        transport.open(replica, SECONDS)
    assert len(senders()) == before + 1
    assert [group.aborted.is_set() for group in of_trainer()] == [True] * 4 + [False]
    assert len(boards(transport)) == 1
    for _ in range(5):
        replica = GpuReplica(workers=1)
        transport.stage(replica, manifest, StageOptions(), SECONDS)
        replica.die()
    until(lambda: len(senders()) == before + 1)  # that of the first replica, which lives
    kept = weakref.ref(replica)
    del replica
    gc.collect()
    assert kept() is None
    until(lambda: len(senders()) == before)
    assert all(group.aborted.is_set() for group in of_trainer())
    assert boards(transport) == []
    transport.close()
    assert transport._place._folder is None


def test_a_version_that_cannot_be_sent_is_printed_and_the_workers_are_notified(
    transport: NcclTransport,
    store: WeightStoreWriter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replica, manifest = GpuReplica(workers=1), store.publish(SENT.items(), 1)
    transport.stage(replica, manifest, StageOptions(), SECONDS)

    def fail(flat: Tensor) -> Transfer:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(of_trainer()[0], "send", fail)
    with pytest.raises(WeightSyncError, match="version 1 did not arrive: the trainer left"):
        replica.load(manifest)
    assert "RuntimeError: NCCL error: unhandled system error" in capsys.readouterr().err


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a CUDA device")
def test_a_trainer_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"needs a CUDA device in the trainer, .* use transport='gloo'"):
        NcclTransport(tmp_path)


def test_a_worker_without_a_gpu_is_refused() -> None:
    place = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    worker = SimpleNamespace(device=torch.device("cpu"), parallel_config=place)
    with pytest.raises(WeightSyncError, match="needs workers with GPUs, this one computes on cpu: use 'gloo'"):
        open_receiver("nccl", {"rank_offset": 1}, worker)


def test_nothing_is_held_to_be_read(transport: NcclTransport, store: WeightStoreWriter) -> None:
    replica = GpuReplica(workers=1)
    transport.open(replica, SECONDS)
    (receiver,) = replica.ends
    with pytest.raises(ManifestMismatch, match="version 3 was not staged"):
        receiver.manifest(3)
    with pytest.raises(WeightSyncError, match="nccl sends during the pause"):
        receiver.reading(store.publish(SENT.items(), 1))


def test_an_address_of_another_host_is_no_place_to_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    transport = NcclTransport(tmp_path, "192.0.2.1", device="cpu")
    with pytest.raises(WeightSyncError, match=r"no NCCL group at 192\.0\.2\.1"):
        transport.open(GpuReplica(), SECONDS)


# -- with GPUs ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_bytes_arrive_on_another_gpu_and_a_worker_that_stalls_is_given_up(tmp_path: Path) -> None:
    sent = {**SENT, "large": torch.arange(1 << 20, dtype=torch.float32)}
    store, transport = WeightStoreWriter(tmp_path), NcclTransport(tmp_path, device="cuda:0", buffer_bytes=1 << 16)
    replica = GpuReplica(workers=1, devices=(1,))
    manifest = store.publish(sent.items(), 1)
    transport.stage(replica, manifest, StageOptions(verify="digest"), SECONDS)
    assert replica.load(manifest) == [7]
    assert all(torch.equal(replica.models[0].loaded[name].cpu(), tensor) for name, tensor in sent.items())
    released = threading.Event()
    replica.models[0].take = lambda name: _wait(released)
    stalled = in_thread(lambda: replica.ends[0].load(manifest))
    transport._links[replica].offer(manifest, 1.0)
    until(lambda: transport._links[replica].broken)
    released.set()
    with pytest.raises(WeightSyncError):
        stalled.result(SECONDS)
    replica.models[0].take = lambda name: None
    transport.stage(replica, manifest, StageOptions(), SECONDS)
    assert replica.load(manifest) == [7]
    transport.close()
