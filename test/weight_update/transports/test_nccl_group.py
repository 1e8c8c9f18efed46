"""A NCCL group: who waits for whom, with vLLM's communicator in a fake. NCCL itself is in ``test_nccl.py``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from support.waiting import HOUR, PATIENCE, in_thread, until
from torchrl_moe._errors import SyncTimeout, WeightSyncError
from torchrl_moe.weight_update.transports.nccl_group import NcclGroup, Transfer, await_until, in_turn, meet

pytest.importorskip("vllm")

CPU = torch.device("cpu")


def nothing_lost() -> str:
    return ""


def soon() -> float:
    return time.monotonic() + PATIENCE


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_what_is_done_is_not_waited_for_and_a_loss_or_the_deadline_ends_waiting() -> None:
    await_until(lambda: True, 0.0, lambda: "lost", "a thing")
    with pytest.raises(WeightSyncError, match="a thing: the replica died"):
        await_until(lambda: False, time.monotonic() + HOUR, lambda: "the replica died", "a thing")
    with pytest.raises(SyncTimeout, match="a thing: the time is up"):
        await_until(lambda: False, time.monotonic(), nothing_lost, "a thing")


def test_nobody_continues_before_all_ranks_have_come() -> None:
    board, come = HashStore(), list[int]()

    def rank(number: int) -> None:
        meet(board, number, 3, soon(), nothing_lost)
        come.append(number)

    with ThreadPoolExecutor(3) as pool:
        trainer, one = pool.submit(rank, 0), pool.submit(rank, 1)
        until(lambda: board.check(["torchrl_moe/here/1"]))
        assert come == []
        pool.submit(rank, 2).result(PATIENCE)
        for other in (trainer, one):
            other.result(PATIENCE)
    assert sorted(come) == [0, 1, 2]


def test_a_rank_that_does_not_come_costs_the_deadline() -> None:
    for rank in (0, 1):
        with pytest.raises(SyncTimeout, match="the 3 ranks of a NCCL group did not meet"):
            meet(HashStore(), rank, 3, time.monotonic(), nothing_lost)


@pytest.mark.parametrize(("num_buffers", "most"), [(1, 1), (2, 2), (3, 3), (9, 5)])
def test_transfers_are_given_in_order_and_no_more_buffers_are_there_than_asked_for(num_buffers: int, most: int) -> None:
    there, peak, waited = 0, 0, list[int]()

    def start(number: int) -> Transfer:
        nonlocal there, peak
        there += 1
        peak = max(peak, there)
        return Transfer(torch.tensor([number]), lambda: True)

    given = []
    for flat in in_turn(
        [lambda number=number: start(number) for number in range(5)],  # type: ignore[misc]
        num_buffers,
        lambda transfer: waited.append(int(transfer.flat)),
    ):
        given.append(int(flat))
        there -= 1
    assert (given, waited, peak) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], most)


# -- the communicator --------------------------------------------------------------------------------------------------


class Communicator:
    """vLLM's, as far as a group knows it."""

    def __init__(self) -> None:
        self.disabled = False
        self.calls: list[tuple[Any, ...]] = []

    def broadcast(self, tensor: Tensor, src: int, stream: Any) -> None:
        self.calls.append((tensor.tolist(), src, stream))

    def destroy(self) -> None:
        self.calls.append(("destroyed",))


class Event:
    def record(self, stream: Any) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream.is_idle


class Cuda:
    """A machine with streams that a test says are idle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        monkeypatch.setattr(torch.cuda, "Stream", self.stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the model's")
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.made.append(stream))

    def stream(self, device: torch.device) -> Any:
        return SimpleNamespace(is_idle=False)


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Sets what vLLM does to join."""
    from vllm.distributed.weight_transfer import nccl_common

    yield lambda function: monkeypatch.setattr(nccl_common, "uid_init_process_group", function)


@pytest.fixture
def communicator(join: Callable[..., Any]) -> Communicator:
    made = Communicator()
    join(lambda unique_id, rank, world_size, device: made)
    return made


def test_bytes_go_on_a_stream_of_the_groups_own_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, communicator: Communicator
) -> None:
    cuda = Cuda(monkeypatch)
    group, other = (NcclGroup(b"id", 0, 2, CPU, soon(), nothing_lost) for _ in range(2))
    sent = group.send(torch.tensor([1, 2], dtype=torch.uint8))
    ((content, src, stream),) = communicator.calls
    assert (content, src, sent.is_done()) == ([1, 2], 0, False)
    assert stream is group._stream is not other._stream
    stream.is_idle = True
    assert sent.is_done()
    received = group.receive(3)
    assert (len(received.flat), received.flat.dtype, cuda.made) == (3, torch.uint8, ["the model's"])
    assert len(communicator.calls) == 2
    group.send(torch.empty(0, dtype=torch.uint8))
    assert len(communicator.calls) == 2  # of nothing there is nothing to send


def test_a_group_is_aborted_once_and_takes_nothing_afterwards(
    monkeypatch: pytest.MonkeyPatch, communicator: Communicator
) -> None:
    Cuda(monkeypatch)
    group = NcclGroup(b"id", 1, 2, CPU, soon(), nothing_lost)
    group.abort()
    group.abort()
    assert communicator.calls == [("destroyed",)]
    with pytest.raises(WeightSyncError, match="the NCCL group was given up"):
        group.receive(1)


def test_a_call_of_nccl_that_does_not_return_costs_a_deadline_and_what_it_makes_later_is_let_go(
    monkeypatch: pytest.MonkeyPatch, join: Callable[..., Any]
) -> None:
    Cuda(monkeypatch)
    released, late = threading.Event(), Communicator()

    def hang(*args: Any) -> Communicator:
        assert released.wait(PATIENCE)
        return late

    join(hang)
    with pytest.raises(SyncTimeout, match="rank 1 of a NCCL group did not join: the time is up"):
        NcclGroup(b"id", 1, 2, CPU, time.monotonic(), nothing_lost)
    released.set()
    until(lambda: late.calls == [("destroyed",)])


def test_an_error_of_nccl_is_raised_and_a_rank_that_is_lost_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, join: Callable[..., Any]
) -> None:
    Cuda(monkeypatch)

    def fail(*args: Any) -> None:
        raise RuntimeError("NCCL error: invalid usage")

    join(fail)
    with pytest.raises(RuntimeError, match="NCCL error: invalid usage"):
        NcclGroup(b"id", 0, 2, CPU, soon(), nothing_lost)
    released = threading.Event()
    join(lambda *args: released.wait(PATIENCE) and Communicator())
    making = in_thread(lambda: NcclGroup(b"id", 0, 2, CPU, soon(), lambda: "the replica died"))
    with pytest.raises(WeightSyncError, match="rank 0 of a NCCL group did not join: the replica died"):
        making.result(PATIENCE)
    released.set()


def test_nccl_that_is_switched_off_is_refused_since_nothing_would_be_sent(
    monkeypatch: pytest.MonkeyPatch, communicator: Communicator
) -> None:
    Cuda(monkeypatch)
    communicator.disabled = True
    with pytest.raises(WeightSyncError, match="VLLM_DISABLE_PYNCCL"):
        NcclGroup(b"id", 0, 2, CPU, soon(), nothing_lost)
