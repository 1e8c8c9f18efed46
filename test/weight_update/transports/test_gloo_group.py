"""Ranks of a gloo group in one process: where they meet, what they send, and what has arrived."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from support.waiting import in_thread, until
from torchrl_moe.errors import DigestMismatch, ReplicaDiedError, SyncTimeout, WeightSyncError
from torchrl_moe.store import WeightStoreReader, WeightStoreWriter
from torchrl_moe.weight_update.transports.gloo import Digests, GlooGroup, Meeting, MeetingPlace

TIMEOUT = 20.0


@pytest.fixture
def pair(place: MeetingPlace) -> Iterator[Callable[[], tuple[GlooGroup, GlooGroup]]]:
    made: list[GlooGroup] = []

    def make() -> tuple[GlooGroup, GlooGroup]:
        where = place.begin()
        joining = in_thread(lambda: GlooGroup(Meeting(where, TIMEOUT), 1, 2, TIMEOUT, 1000))
        trainer = GlooGroup(place.meet(where, TIMEOUT), 0, 2, TIMEOUT, 1000)
        made.extend((trainer, joining.result(TIMEOUT)))
        return made[-2], made[-1]

    yield make
    for group in made:
        group.close()


Pair = Callable[[], tuple[GlooGroup, GlooGroup]]


def nine(value: int = 0) -> torch.Tensor:
    return torch.full((9,), value, dtype=torch.uint8)


def later(seconds: float = TIMEOUT) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 3500])
def test_bytes_arrive_in_buckets_whatever_their_number(pair: Pair, size: int) -> None:
    trainer, worker = pair()
    sent, got = torch.arange(size).to(torch.uint8), torch.zeros(size, dtype=torch.uint8)
    seen: list[int] = []
    receiving = in_thread(lambda: worker.broadcast(got, later(), seen.append))
    trainer.broadcast(sent, later(), lambda _: None)
    receiving.result(TIMEOUT)
    assert torch.equal(sent, got)
    assert seen == [min(stop, size) for stop in range(1000, size + 1000, 1000)]
    assert not torch.distributed.is_initialized()  # the default group is left alone


def test_a_worker_is_ready_once_for_each_transfer(pair: Pair) -> None:
    trainer, worker = pair()
    for _ in range(2):
        assert not trainer.all_ready()
        worker.announce()
        until(trainer.all_ready, TIMEOUT)
        receiving = in_thread(lambda: worker.broadcast(nine(), later(), lambda _: None))
        trainer.broadcast(nine(1), later(), lambda _: None)
        receiving.result(TIMEOUT)


def test_several_ranks_that_do_not_come_cost_one_deadline_and_not_one_each(place: MeetingPlace) -> None:
    waits: list[int] = []
    with pytest.raises(SyncTimeout, match="the 3 ranks"):
        GlooGroup(place.meet(place.begin(), 0.0, lambda: waits.append(1)), 0, 3, 9.0)
    assert waits == [1]  # at the first rank that was missing, the time was up


def test_an_error_of_who_waits_ends_the_meeting_at_once(place: MeetingPlace) -> None:
    where = place.begin()

    def die() -> None:
        raise ReplicaDiedError("it is gone")

    with pytest.raises(ReplicaDiedError, match="it is gone"):
        GlooGroup(place.meet(where, TIMEOUT, die), 0, 2, TIMEOUT)
    assert not os.path.exists(where["folder"])


def test_a_group_that_nobody_holds_any_more_ends(place: MeetingPlace) -> None:
    before, where = threads(), place.begin()
    group = GlooGroup(place.meet(where, TIMEOUT), 0, 1, TIMEOUT)
    assert threads() > before
    del group
    assert (threads(), os.path.exists(where["folder"])) == (before, False)


def test_a_group_that_was_not_made_leaves_no_socket_even_if_its_error_is_kept(place: MeetingPlace) -> None:
    """A log keeps errors, with their frames; a rank that has connected would wait for the open socket."""
    before = threads()
    with pytest.raises(SyncTimeout) as kept:
        GlooGroup(place.meet(place.begin(), 0.0), 0, 2, TIMEOUT)
    until(lambda: threads() == before, TIMEOUT)
    assert kept.value.__traceback__ is not None


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_rank_that_does_not_send_is_a_timeout_and_one_that_left_an_error(pair: Pair) -> None:
    trainer, worker = pair()
    with pytest.raises(SyncTimeout, match="0 of 9 bytes were sent when the time was up"):
        worker.broadcast(nine(), later(0.2), lambda _: None)
    trainer, worker = pair()
    trainer.close()
    with pytest.raises(RuntimeError):
        worker.broadcast(nine(), later(), lambda _: None)


def test_an_error_of_who_watches_ends_the_transfer(pair: Pair) -> None:
    trainer, worker = pair()
    got = torch.zeros(2000, dtype=torch.uint8)
    receiving = in_thread(lambda: worker.broadcast(got[:1000], later(), lambda _: None))

    def refuse(count: int) -> None:
        raise ValueError(f"after {count}")

    with pytest.raises(ValueError, match="after 1000"):
        trainer.broadcast(torch.ones(2000, dtype=torch.uint8), later(), refuse)
    receiving.result(TIMEOUT)
    assert got.sum() == 1000


def test_who_does_not_come_is_named_when_the_time_is_up_whatever_gloo_would_wait(place: MeetingPlace) -> None:
    with pytest.raises(TimeoutError, match="rank/1, rank/2 did not come"):
        Meeting(place.begin(), 0.0).wait(["rank/1", "rank/2"], timedelta(hours=1))


def test_a_value_is_there_whole_or_not_at_all_whatever_its_key(place: MeetingPlace) -> None:
    where = place.begin()
    one, other = Meeting(where, TIMEOUT), Meeting(where, TIMEOUT)
    one.set("gloo/0/../1", b"first")
    one.set("gloo/0/../1", b"second")
    assert other.get("gloo/0/../1") == b"second"
    assert (other.check(["gloo/0/../1"]), other.check(["gloo", "gloo/0/../1"])) == (True, False)
    assert len(list(Path(where["folder"]).iterdir())) == 1


@pytest.mark.parametrize("how", ["the meeting", "its place"])
def test_who_is_late_for_a_meeting_that_is_over_hears_of_it_at_once(place: MeetingPlace, how: str) -> None:
    where = place.begin()
    board = Meeting(where, TIMEOUT)
    place.close() if how == "its place" else place.end(where)
    uses = [lambda: board.set("key", b"value"), lambda: board.get("key")]
    uses += [lambda: board.check(["key"]), lambda: board.wait(["key"])]
    for use in uses:
        with pytest.raises(RuntimeError, match="the trainer has given the group up"):
            use()


def test_a_folder_that_is_not_here_is_another_hosts(tmp_path: Path) -> None:
    with pytest.raises(
        WeightSyncError, match="is another host, and transport='gloo' reaches one host: use transport='memmap'"
    ):
        Meeting({"folder": str(tmp_path / "none")}, TIMEOUT)


TENSORS = {"a": torch.arange(100.0).view(10, 10), "b": torch.tensor(2.5, dtype=torch.bfloat16), "c": torch.empty(0, 3)}


@pytest.mark.parametrize("with_pool", [True, False])
def test_only_what_has_arrived_is_compared_and_nothing_without_a_pool(tmp_path: Path, with_pool: bool) -> None:
    writer = WeightStoreWriter(tmp_path)
    manifest = writer.publish(TENSORS.items(), 1)
    with WeightStoreReader(tmp_path).flat(manifest) as (_, flat):
        arrived = torch.from_numpy(flat.copy())
    writer.close()
    last = manifest.entries[1]
    assert (last.name, last.nbytes, last.end >= manifest.entries[0].end) == ("b", 2, True)
    arrived[last.offset] ^= 1
    with ThreadPoolExecutor(1) as pool:
        digests = Digests(manifest, arrived, pool if with_pool else None)
        digests.arrived(last.offset)
        digests.result()  # the byte that is wrong is not there yet
        digests.arrived(last.end)
        if not with_pool:
            digests.result()
            return
        with pytest.raises(DigestMismatch, match=f"version 1: bytes of {last.name} are not those published"):
            digests.result()
