"""The gloo transport: one communicator per replica, over which the store's bytes are broadcast while it generates.

A replica announces that it will read before anything is sent, so that one that refuses a version costs nobody a
deadline. A group in which anything failed is given up, and made again for the next version: the other replicas have
their own, and notice nothing. At the worker's end the bytes come into one buffer that is kept from version to version;
tensors are views of it, and never copied before they are loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchrl_moe._errors import (
    ManifestMismatch,
    ReplicaDiedError,
    SyncTimeout,
    TorchRLMoEError,
    WeightSyncError,
)
from torchrl_moe.weight_update.store import Manifest, TensorEntry, WeightStoreReader
from torchrl_moe.weight_update.store.flat import check_digest
from torchrl_moe.weight_update.transports.base import Peer, StageOptions, StageReport, workers_of
from torchrl_moe.weight_update.transports.gloo_group import BUFFER_BYTES, SENDER, GlooGroup
from torchrl_moe.weight_update.transports.meeting import LOOPBACK, Meeting, MeetingPlace, board_of, own_address

__all__ = ["GlooReceiver", "GlooTransport"]

RANK_OFFSET = 1  # of a replica's workers, behind the trainer
POLL_SECONDS = 0.002
LEAST_SECONDS = 0.001
GRACE_SECONDS = 5.0  # that a replica gets to say why a transfer failed

# -- the trainer's end ------------------------------------------------------------------------------------------------


class GlooTransport:
    """Sends versions by broadcast, each replica's by itself.

    Args:
        folder: of the weight store, whose slots are sent as they lie there.
        address: where to meet; the replicas must reach it. Loopback by default, where they meet without a port.
        device: of the trainer; only the CPU has a meaning here.
        buffer_bytes: sent at a time; 64 MiB by default.

    Raises:
        ValueError: another device than the CPU, or no byte in a buffer.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        address: str = LOOPBACK,
        device: torch.device | str | int = "cpu",
        buffer_bytes: int | None = None,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(f"device={str(device)!r}: transport='gloo' sends from the CPU; 'nccl' sends from a GPU")
        self._reader = WeightStoreReader(os.fspath(folder))
        self._address, self._buffer_bytes = address, BUFFER_BYTES if buffer_bytes is None else buffer_bytes
        if self._buffer_bytes < 1:
            raise ValueError(f"buffer_bytes must be at least 1, got {buffer_bytes}")
        self._place = MeetingPlace(address)
        self._groups: weakref.WeakKeyDictionary[Peer, GlooGroup] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def open(self, replica: Peer, timeout: float) -> None:
        """Meet a replica's workers; in place of a group from before.

        Raises:
            SyncTimeout: they did not come in time.
            ReplicaDiedError: the replica ended meanwhile.
            EngineError: the replica does not answer.
            WeightSyncError: nobody can meet there: the address is not this host's, or the interface does not exist.
        """
        self._drop(replica)
        workers = workers_of(replica.wait_ready(timeout))
        try:
            group = self._meet(replica, workers, timeout)
        except TorchRLMoEError:  # one of which is an OSError too
            raise
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(f"no gloo group at {self._address}: {error}") from None
        with self._lock:
            self._groups[replica] = group

    def _meet(self, replica: Peer, workers: int, timeout: float) -> GlooGroup:
        where, deadline = self._place.begin(), time.monotonic() + timeout
        options = {
            "meeting": where,
            "world_size": workers + RANK_OFFSET,
            "rank_offset": RANK_OFFSET,
            "timeout_seconds": timeout,
            "buffer_bytes": self._buffer_bytes,
        }

        known = weakref.ref(replica)  # what the group keeps must not keep the replica

        def check() -> None:
            if (there := known()) is not None and not there.is_alive():
                raise ReplicaDiedError("the replica ended before its workers came")

        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._place.end, where)
            replica.init_weights("gloo", options, timeout)
            left = max(deadline - time.monotonic(), LEAST_SECONDS)
            meeting, size = self._place.meet(where, left, check), workers + RANK_OFFSET
            group = GlooGroup(meeting, SENDER, size, left, self._buffer_bytes, own_address(where))
            on_failure.pop_all()
        return group

    def _drop(self, replica: Peer) -> None:
        with self._lock:
            group = self._groups.pop(replica, None)
        if group is not None:
            group.close()

    def stage(self, replica: Peer, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        """Send a version to a replica, which generates meanwhile.

        Raises:
            SyncTimeout: it was not done in time.
            ReplicaDiedError: the replica ended meanwhile.
            WeightSyncError: the replica refused the version, or the connection broke.
        """
        deadline = time.monotonic() + timeout
        if replica not in self._groups:
            self.open(replica, timeout)
        caller = ThreadPoolExecutor(1, thread_name_prefix="weight-stage")
        answer = caller.submit(
            replica.stage_weights,
            manifest.version,
            stage=options.stage,
            verify=options.verify,
            threads=options.threads,
            manifest=manifest.to_json(),
            timeout=timeout,
        )
        arrived = False
        try:
            self._send(self._groups[replica], manifest, answer, deadline)
            report: StageReport = answer.result(max(deadline - time.monotonic(), 0))
            arrived = True
        except TimeoutError as error:
            raise SyncTimeout(f"version {manifest.version} was not there within {timeout:g} s: {error}") from None
        except RuntimeError as error:  # of gloo, which knows only that a connection broke
            self._drop(replica)
            raise _own_words(answer) or WeightSyncError(f"version {manifest.version} was not sent: {error}") from None
        finally:
            if not arrived:
                self._drop(replica)  # what still waits in it is woken by that
            caller.shutdown(wait=False)
        return report

    def _send(self, group: GlooGroup, manifest: Manifest, answer: Future[Any], deadline: float) -> None:
        while not group.all_ready():
            if answer.done():
                answer.result()
                raise WeightSyncError(f"the replica took version {manifest.version} without waiting for its bytes")
            if time.monotonic() > deadline:
                raise SyncTimeout("the replica did not get ready to receive")
            time.sleep(POLL_SECONDS)

        def check(_: int) -> None:
            if answer.done():
                answer.result()

        with self._reader.flat(manifest) as flat:
            group.broadcast(_tensor(flat), deadline, check)

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        for replica in list(self._groups):
            self._drop(replica)
        self._place.close()


def _own_words(answer: Future[Any]) -> BaseException | None:
    """Return what a replica says of a transfer that failed, if it says it in time."""
    with contextlib.suppress(FutureTimeout):
        return answer.exception(GRACE_SECONDS)
    return None


def _tensor(flat: Any) -> Tensor:
    """Return bytes as a tensor, without a copy, and without torch's warning that they cannot be written to."""
    if not len(flat):
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * len(flat)).from_address(flat.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


# -- a worker's end ---------------------------------------------------------------------------------------------------


class GlooReceiver:
    """Receives versions. It meets the trainer in a thread: a worker that waits makes no tokens.

    Args:
        options: what the trainer's end says: where the ``meeting`` is, ``world_size`` of the group (the trainer and
            this replica's workers), ``buffer_bytes``, and ``timeout_seconds`` to meet, and for each transfer.
        rank: of this worker, from 1 on.

    Raises:
        WeightSyncError: the meeting is on another host.
    """

    loads_during_pause = ""

    def __init__(self, options: Mapping[str, Any], rank: int) -> None:
        self._timeout = float(options["timeout_seconds"])
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._held: Manifest | None = None
        self._lock = threading.Lock()  # of the buffer
        self._meeting = Meeting(board_of(options["meeting"]), self._timeout)
        joining = ThreadPoolExecutor(1, thread_name_prefix="weight-meeting")
        self._group = joining.submit(_join, self._meeting, dict(options), rank)
        joining.shutdown(wait=False)  # the thread ends with its job

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Receive a version; call it from a thread.

        Args:
            manifest: what will come.
            verify: compare the digest of each tensor, while others arrive.
            threads: that hash.

        Raises:
            SyncTimeout: the trainer did not come, or did not send in time.
            DigestMismatch: other bytes arrived than were published.
            RuntimeError: of gloo: the trainer is gone.
        """
        deadline, size = time.monotonic() + self._timeout, manifest.extent
        if not self._lock.acquire(timeout=self._timeout):
            raise SyncTimeout(f"the version before was still read after {self._timeout:g} s")
        arrived = False
        try:
            self._held = None
            if len(self._buffer) < size:
                self._buffer = torch.empty(size, dtype=torch.uint8)
            group, flat = self._group.result(), self._buffer[:size]
            with ThreadPoolExecutor(threads, thread_name_prefix="weight-digest") as pool:
                digests = _Digests(manifest, flat, pool if verify else None)
                group.announce()
                group.broadcast(flat, deadline, digests.arrived)
            digests.result()
            self._held, arrived = manifest, True
        finally:
            if not arrived:
                self._leave()  # the trainer makes a new group
            self._lock.release()

    def _leave(self) -> None:
        if self._group.done() and self._group.exception() is None:
            self._group.result().close()

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of the version that is held.

        Raises:
            ManifestMismatch: it is another one, or none.
        """
        held = self._held
        if held is None or held.version != version:
            raise ManifestMismatch(
                f"version {version} was not received; {'no version' if held is None else f'version {held.version}'} was"
            )
        return held

    @contextmanager
    def reading(self, manifest: Manifest, *, verify: bool = False) -> Iterator[Mapping[str, Tensor]]:
        """Keep the next version out of the buffer, and give the tensors in it; do not keep them afterwards."""
        del verify  # done as they arrived
        with self._lock:
            if self.manifest(manifest.version) != manifest:
                raise ManifestMismatch(f"version {manifest.version} was received again since its manifest was read")
            yield {entry.name: _tensor_in(self._buffer, entry) for entry in manifest.entries}

    def load(self, manifest: Manifest) -> NoReturn:
        """Refuse: a version is fetched before the pause."""
        raise WeightSyncError(f"version {manifest.version} is fetched, and not loaded as it arrives")

    def close(self) -> None:
        """Leave the group, or give up meeting it; a receiver that still waits gets an error. Idempotent."""
        self._meeting.close()
        self._group.add_done_callback(lambda _: self._leave())
        self._held = None


def _join(meeting: Meeting, options: Mapping[str, Any], rank: int) -> GlooGroup:
    address = own_address(options["meeting"])
    return GlooGroup(meeting, rank, options["world_size"], options["timeout_seconds"], options["buffer_bytes"], address)


def _tensor_in(flat: Tensor, entry: TensorEntry) -> Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    return flat[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)


class _Digests:
    """Compares the tensors that have arrived, while others arrive."""

    def __init__(self, manifest: Manifest, flat: Tensor, pool: ThreadPoolExecutor | None) -> None:
        self._version, self._pool = manifest.version, pool
        self._left = sorted(manifest.entries, key=lambda entry: entry.offset, reverse=True)
        self._bytes: Any = flat.numpy()
        self._jobs: list[Future[None]] = []

    def arrived(self, count: int) -> None:
        """Take note that the first ``count`` bytes are there."""
        whole = []
        while self._left and self._left[-1].end <= count:
            whole.append(self._left.pop())
        if self._pool is not None:
            self._jobs.append(self._pool.submit(self._compare, whole))

    def _compare(self, entries: list[TensorEntry]) -> None:
        for entry in entries:
            check_digest(self._version, entry, self._bytes[entry.offset : entry.end].data)

    def result(self) -> None:
        """Raise what was found."""
        for job in self._jobs:
            job.result()
