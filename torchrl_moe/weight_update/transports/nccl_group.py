"""A NCCL communicator of its own between one trainer and the workers of one replica, to send flat bytes through.

NCCL has no deadline: a call whose peer is gone never returns, nor does a kernel that waits for one end. So the ranks
meet at a board of ours before any of them calls NCCL, each communicator has a stream of its own, no thread waits for a
stream, but only polls whether a transfer is done, and one whose peer is lost is aborted. The communicator is vLLM's;
NCCL's unique id, which lets a rank in, reaches the workers over the replica's own connection and not over the board.

It has never run on a GPU.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_moe._errors import SyncTimeout, WeightSyncError

__all__ = ["Lost", "NcclGroup", "Transfer", "await_until", "in_turn", "meet", "new_unique_id"]

POLL_SECONDS = 0.001
LOST_SECONDS = 0.05  # between two checks whether the peer is lost
TRAINER = 0
GO = "torchrl_moe/go"

Lost = Callable[[], str]
"""Returns why to stop waiting; ``""`` to go on."""


def new_unique_id() -> bytes:
    """Return the id of a new communicator, in the trainer."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId())


def await_until(is_done: Callable[[], bool], deadline: float, lost: Lost, what: str) -> None:
    """Wait until something is done.

    Args:
        is_done: whether it is; it must not wait itself.
        deadline: by ``time.monotonic()``.
        lost: asked meanwhile.
        what: it is, for the errors.

    Raises:
        SyncTimeout: the deadline passed.
        WeightSyncError: it is lost.
    """
    ask_at = 0.0
    while not is_done():
        now = time.monotonic()
        if now >= ask_at:
            if reason := lost():
                raise WeightSyncError(f"{what}: {reason}")
            ask_at = now + LOST_SECONDS
        if now > deadline:
            raise SyncTimeout(f"{what}: the time is up")
        time.sleep(POLL_SECONDS)


def meet(board: Any, rank: int, world_size: int, deadline: float, lost: Lost) -> None:
    """Wait, as the trainer or as a worker, until all ranks are there.

    Args:
        board: where they report that: ``set(key, bytes)`` and ``check(keys)``, as torch's stores have them.
        rank: 0 is the trainer.
        world_size: the trainer and the workers.
        deadline: by ``time.monotonic()``.
        lost: asked meanwhile.

    Raises:
        SyncTimeout: not all came.
        WeightSyncError: one is lost.
    """
    here = [f"torchrl_moe/here/{worker}" for worker in range(1, world_size)]
    words = f"the {world_size} ranks of a NCCL group did not meet"
    if rank == TRAINER:
        await_until(lambda: bool(board.check(here)), deadline, lost, words)
        board.set(GO, b"")
        return
    board.set(here[rank - 1], b"")
    await_until(lambda: bool(board.check([GO])), deadline, lost, words)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes on their way: uint8 ``[N]`` on the group's device, not to be touched before ``is_done()``."""

    flat: Tensor
    is_done: Callable[[], bool]


class NcclGroup:
    """One communicator. Making it waits until all ranks have joined; they must have met before.

    Args:
        unique_id: of :func:`new_unique_id`.
        rank: 0 is the trainer.
        world_size: the trainer and the workers.
        device: of this rank, with its index.
        deadline: by ``time.monotonic()``, to join.
        lost: asked while joining.

    Raises:
        SyncTimeout: not all joined.
        WeightSyncError: a rank is lost, or vLLM has NCCL switched off.
        RuntimeError: of NCCL.
    """

    def __init__(
        self, unique_id: bytes, rank: int, world_size: int, device: torch.device, deadline: float, lost: Lost
    ) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self._device, self._lock, self._aborted = device, threading.Lock(), False
        self._stream = torch.cuda.Stream(device)
        joined: Future[Any] = Future()

        def join() -> None:
            try:
                joined.set_result(uid_init_process_group(unique_id, rank, world_size, device))
            except BaseException as error:  # noqa: BLE001  raised where the future is awaited
                joined.set_exception(error)

        # a daemon: NCCL may never return, and then must not hold back the end of the process
        threading.Thread(target=join, name="nccl-join", daemon=True).start()
        try:
            await_until(joined.done, deadline, lost, f"rank {rank} of a NCCL group did not join")
        except BaseException:
            joined.add_done_callback(_destroy_late)
            raise
        self._communicator = joined.result()
        if self._communicator.disabled:
            raise WeightSyncError("vLLM has NCCL switched off (VLLM_DISABLE_PYNCCL): use transport='gloo'")

    def send(self, flat: Tensor) -> Transfer:
        """Begin to send bytes from host memory to all workers, as the trainer."""
        with torch.cuda.stream(self._stream):
            return self._begin(flat.to(self._device, non_blocking=True))

    def receive(self, size: int) -> Transfer:
        """Begin to receive bytes, as a worker. They may be used on the stream that is the current one now."""
        user = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            transfer = self._begin(torch.empty(size, dtype=torch.uint8, device=self._device))
        transfer.flat.record_stream(user)  # its memory is not reused before that stream has read it
        return transfer

    def _begin(self, flat: Tensor) -> Transfer:
        with self._lock:
            if self._aborted:
                raise WeightSyncError("the NCCL group was given up")
        if len(flat):
            self._communicator.broadcast(flat, src=TRAINER, stream=self._stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Transfer(flat, event.query)

    def abort(self) -> None:
        """End the communicator; transfers in progress end incomplete. Idempotent."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        self._communicator.destroy()


def _destroy_late(joined: Future[Any]) -> None:
    """Destroy a communicator that was made after all."""
    if joined.exception() is None:
        joined.result().destroy()


def in_turn(
    starts: Iterable[Callable[[], Transfer]], num_buffers: int, wait: Callable[[Transfer], None]
) -> Iterator[Tensor]:
    """Yield the bytes of finished transfers, in order, while others are in progress.

    Args:
        starts: each begins one transfer.
        num_buffers: how many there may be at a time, the yielded one included.
        wait: waits for one of them.
    """
    under_way: deque[Transfer] = deque()
    for start in starts:
        under_way.append(start())
        if len(under_way) == num_buffers:
            wait(under_way[0])
            yield under_way.popleft().flat
    while under_way:
        wait(under_way[0])
        yield under_way.popleft().flat
