"""The nccl transport: one communicator per replica, from GPU to GPU, over which the store's bytes are broadcast.

The bytes go straight into the replica's model, so they go during its pause: staging only checks names, and leaves a
thread that sends when the replica's workers report that they wait. A group in which a transfer broke is given up, and
made again for the next version: each replica has its own, with a thread and a stream of its own, so the others notice
nothing. It needs two GPUs and has never been run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_moe._errors import ManifestMismatch, TorchRLMoEError, WeightSyncError
from torchrl_moe.weight_update.store import Manifest, WeightStoreReader
from torchrl_moe.weight_update.transports.arriving import as_tensor
from torchrl_moe.weight_update.transports.base import Peer, StageOptions, StageReport, workers_of
from torchrl_moe.weight_update.transports.chunks import Chunk, chunks_of
from torchrl_moe.weight_update.transports.meeting import LOOPBACK, MeetingPlace, board_of
from torchrl_moe.weight_update.transports.nccl_group import (
    TRAINER,
    NcclGroup,
    Transfer,
    await_until,
    in_turn,
    meet,
    new_unique_id,
)

__all__ = ["NcclReceiver", "NcclTransport"]

RANK_OFFSET = 1  # of a replica's workers, behind the trainer
BUFFER_BYTES = 256 << 20
NUM_BUFFERS = 2
POLL_SECONDS = 0.005
CLOSE_SECONDS = 1.0  # that a thread gets to notice


def _ready(load: int, rank: int) -> str:
    """Return the key by which a worker reports that it begins its ``load``-th load, and waits for the bytes."""
    return f"torchrl_moe/ready/{load}/{rank}"


def _left(rank: int) -> str:
    """Return the key by which a worker reports that it has left the group."""
    return f"torchrl_moe/left/{rank}"


# -- the trainer's end ------------------------------------------------------------------------------------------------


class NcclTransport:
    """Sends versions by NCCL.

    Args:
        folder: of the weight store, whose slots are sent as they are.
        address: where to meet, at ``port`` (0: a free one); the replicas must reach it. Loopback by default.
        device: the trainer's GPU.
        buffer_bytes: sent at a time; a larger tensor is sent alone.
        num_buffers: of that size, at each end.

    Raises:
        WeightSyncError: torch sees no GPU.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        address: str = LOOPBACK,
        device: torch.device | str | int = "cuda",
        buffer_bytes: int = BUFFER_BYTES,
        num_buffers: int = NUM_BUFFERS,
        port: int = 0,
    ) -> None:
        if not torch.cuda.is_available():
            raise WeightSyncError(
                "transport='nccl' needs a CUDA device in the trainer, and torch sees none: use transport='gloo', or "
                "'memmap' on one host"
            )
        self._reader = WeightStoreReader(os.fspath(folder))
        self._address, self._buffers = address, (buffer_bytes, num_buffers)
        self._place = MeetingPlace(address, port)
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._links: weakref.WeakKeyDictionary[Peer, _Link] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def open(self, replica: Peer, timeout: float) -> None:
        """Meet a replica's workers, replacing an earlier group.

        Raises:
            SyncTimeout: they did not come in time.
            EngineError: the replica does not answer.
            WeightSyncError: no group can meet there, or NCCL failed.
        """
        self._drop(replica)
        workers = workers_of(replica.wait_ready(timeout))
        try:
            link = self._meet(replica, workers, timeout)
        except TorchRLMoEError:  # one of which is an OSError too
            raise
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(f"no NCCL group at {self._address}: {error}") from None
        link.end = weakref.finalize(replica, link.close)  # the group ends with its replica
        with self._lock:
            self._links[replica] = link

    def _meet(self, replica: Peer, workers: int, timeout: float) -> _Link:
        deadline, world_size = time.monotonic() + timeout, workers + RANK_OFFSET
        where, unique_id = self._place.begin(), new_unique_id()
        board = self._place.meet(where, timeout)  # it exists as long as the group: workers check that
        options = {
            "meeting": where,
            "unique_id": unique_id.hex(),
            "world_size": world_size,
            "rank_offset": RANK_OFFSET,
            "timeout_seconds": timeout,
            "buffer_bytes": self._buffers[0],
            "num_buffers": self._buffers[1],
        }
        caller = ThreadPoolExecutor(1, thread_name_prefix="weight-meeting")
        answer = caller.submit(replica.init_weights, "nccl", options, timeout)
        caller.shutdown(wait=False)

        def lost() -> str:
            if answer.done():
                answer.result()  # raises the replica's error
            return ""

        with contextlib.ExitStack() as on_failure:
            on_failure.callback(board.close)
            meet(board, TRAINER, world_size, deadline, lost)
            group = NcclGroup(unique_id, TRAINER, world_size, self._device, deadline, lost)
            on_failure.callback(group.abort)
            answer.result(max(deadline - time.monotonic(), 0.0))
            on_failure.pop_all()
        known = weakref.ref(replica)  # what the link keeps must not keep the replica
        return _Link(group, board, world_size, self._reader, self._buffers, lambda: _lives(known()))

    def _drop(self, replica: Peer) -> None:
        with self._lock:
            link = self._links.pop(replica, None)
        if link is not None:
            link.end()

    def stage(self, replica: Peer, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        """Let a replica check a version, and be ready to send it; they meet again if that broke before.

        With ``verify="digest"`` the workers hash what they receive before they load it.
        """
        link = self._links.get(replica)
        if link is None or link.broken:
            self.open(replica, timeout)
        report = replica.stage_weights(
            manifest.version,
            verify=options.verify,
            threads=options.threads,
            manifest=manifest.to_json(),
            timeout=timeout,
        )
        self._links[replica].offer(manifest, timeout)
        return report

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        for replica in list(self._links):
            self._drop(replica)
        self._place.close()


def _lives(replica: Peer | None) -> bool:
    return replica is not None and replica.is_alive()


class _Link:
    """A replica's group, and the thread that sends it the offered version whenever it asks.

    Once it is ``broken`` its group was aborted, and it sends no more.

    Args:
        group: the communicator.
        board: where the workers report what they do; closed with the group.
        world_size: of the group.
        reader: of the weight store.
        buffers: bytes of one, and how many.
        is_alive: whether the replica is.
    """

    end: Callable[[], Any]  # closes it, once

    def __init__(
        self,
        group: NcclGroup,
        board: Any,
        world_size: int,
        reader: WeightStoreReader,
        buffers: tuple[int, int],
        is_alive: Callable[[], bool],
    ) -> None:
        self._group, self._board, self._reader, self._buffers = group, board, reader, buffers
        self._workers, self._is_alive = range(RANK_OFFSET, world_size), is_alive
        self._offered: tuple[Manifest, float] | None = None
        self.broken = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)
        self._thread.start()

    def offer(self, manifest: Manifest, timeout: float) -> None:
        """Send this version from now on, each time within ``timeout`` seconds."""
        self._offered = manifest, timeout

    def _run(self) -> None:
        try:
            self._send_when_asked()
        except (RuntimeError, OSError, ValueError, TorchRLMoEError) as error:
            if not self._lost():
                traceback.print_exception(error)  # there is no caller to raise to
        finally:
            self.broken = True
            self._end()

    def _end(self) -> None:
        self._board.close()  # so the workers notice
        self._group.abort()

    def _send_when_asked(self) -> None:
        load = 0
        while not self._lost():
            offered = self._offered
            if offered is not None and self._board.check([_ready(load, rank) for rank in self._workers]):
                self._send(*offered)
                load += 1
            else:
                self._closed.wait(POLL_SECONDS)

    def _lost(self) -> str:
        """Return why there is nothing more to do."""
        if self._closed.is_set():
            return "the trainer left"
        if not self._is_alive():
            return "the replica died"
        gone = [rank for rank in self._workers if self._board.check([_left(rank)])]
        return f"worker {gone[0] - RANK_OFFSET} gave the group up" if gone else ""

    def _send(self, manifest: Manifest, timeout: float) -> None:
        deadline, (buffer_bytes, num_buffers) = time.monotonic() + timeout, self._buffers

        def wait(transfer: Transfer) -> None:
            await_until(transfer.is_done, deadline, self._lost, f"version {manifest.version} was not sent")

        with self._reader.flat(manifest) as flat:
            content = as_tensor(flat)
            starts = [partial(self._group.send, content[chunk.span]) for chunk in chunks_of(manifest, buffer_bytes)]
            for _ in in_turn(starts, num_buffers, wait):
                pass

    def close(self) -> None:
        """Stop sending and leave the group. Idempotent."""
        self._closed.set()
        if threading.current_thread() is not self._thread:  # it may itself be the one that collects a replica
            self._thread.join(CLOSE_SECONDS)
        self._end()  # the thread may be in a call of NCCL, which returns then


# -- a worker's end ---------------------------------------------------------------------------------------------------


class NcclReceiver:
    """Receives versions and loads them at the same time, by :meth:`load`.

    Making it waits for the trainer, which is at the rendezvous by then. The worker generates nothing meanwhile, since
    communicators must not be made while others are in use.

    Args:
        options: from the trainer's end: ``meeting``, where the ranks meet, ``unique_id`` and ``world_size`` of the
            group, ``buffer_bytes``, ``num_buffers``, and ``timeout_seconds`` to meet the trainer and for each load.
        rank: of this worker in the group.
        worker: our weight engine, for its device and model.

    Raises:
        WeightSyncError: the worker has no GPU, or a rank is lost.
        SyncTimeout: the others did not come in time.
    """

    loads_during_pause = "nccl sends during the pause"

    def __init__(self, options: Mapping[str, Any], rank: int, worker: Any) -> None:
        if worker.device.type != "cuda":
            raise WeightSyncError(
                f"transport='nccl' needs workers with GPUs, this one computes on {worker.device.type}: use 'gloo'"
            )
        self._timeout, world_size = float(options["timeout_seconds"]), options["world_size"]
        self._buffer_bytes, self._num_buffers = options["buffer_bytes"], options["num_buffers"]
        self._rank, self._loads, self._verify = rank, 0, False
        self._model = worker.model
        deadline = time.monotonic() + self._timeout
        self._board = board_of(options["meeting"])
        meet(self._board, rank, world_size, deadline, self._lost)
        unique_id = bytes.fromhex(options["unique_id"])
        self._group = NcclGroup(unique_id, rank, world_size, worker.device, deadline, self._lost)

    def _lost(self) -> str:
        try:
            self._board.check([_left(self._rank)])
        except (RuntimeError, OSError) as error:  # the board is the trainer's, and ends with it
            return f"the trainer left: {error}"
        return ""

    def manifest(self, version: int) -> Manifest:
        """Refuse: only what was staged has a manifest here."""
        raise ManifestMismatch(f"version {version} was not staged")

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> str:
        """Note whether to compare digests; the bytes come when :meth:`load` asks for them."""
        del manifest, threads
        self._verify = verify
        return self.loads_during_pause

    def reading(self, manifest: Manifest) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Refuse: nothing is held."""
        raise WeightSyncError(f"version {manifest.version} is not held here: {self.loads_during_pause}")

    def load(self, manifest: Manifest) -> int:
        """Report that this worker waits, receive a version into the model, and return how many tensors it took.

        If the model refuses a tensor, or a digest is wrong, the rest is still received: the group stays usable.

        Raises:
            SyncTimeout: it did not come in time.
            WeightSyncError: the trainer left.
            DigestMismatch: other bytes arrived than were published; tensors before those are loaded by then.
        """
        taken = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal taken
            for chunk, flat in arriving:
                if self._verify:
                    chunk.verify(manifest.version, flat)
                for name, tensor in chunk.tensors(flat):
                    taken += 1
                    yield name, tensor

        arriving = self._arriving(manifest)
        try:
            self._model.load_weights(tensors())
        finally:
            for _ in arriving:
                pass
        return taken

    def _arriving(self, manifest: Manifest) -> Iterator[tuple[Chunk, Tensor]]:
        """Receive a version in chunks; if that fails the group is given up."""
        deadline = time.monotonic() + self._timeout

        def wait(transfer: Transfer) -> None:
            await_until(transfer.is_done, deadline, self._lost, f"version {manifest.version} did not arrive")

        chunks = chunks_of(manifest, self._buffer_bytes)
        try:
            if reason := self._lost():
                raise WeightSyncError(f"version {manifest.version} did not arrive: {reason}")
            self._board.set(_ready(self._loads, self._rank), b"")
            self._loads += 1
            starts = [partial(self._group.receive, chunk.size) for chunk in chunks]
            flats = in_turn(starts, self._num_buffers, wait)
            yield from zip(chunks, flats, strict=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group, and report that. Idempotent."""
        with contextlib.suppress(RuntimeError, OSError):  # the trainer, and with it the board, may be gone
            self._board.set(_left(self._rank), b"")
        self._group.abort()
