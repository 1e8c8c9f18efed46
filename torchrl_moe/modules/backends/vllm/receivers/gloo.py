"""The worker's end of the gloo transport: it takes a version's bytes while the engine generates.

They come into one buffer that is kept from version to version; tensors are views of it, and never copied before they
are loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor

from torchrl_moe._errors import DigestMismatch, ManifestMismatch, SyncTimeout
from torchrl_moe.data.gloo_group import GlooGroup, join_rendezvous
from torchrl_moe.data.weight_store import Manifest, TensorEntry

__all__ = ["GlooReceiver"]


class GlooReceiver:
    """Receives versions. It meets the trainer in a thread: a worker that waits makes no tokens.

    Args:
        options: what the trainer's end says: ``address`` and ``port`` of its rendezvous, ``world_size`` of the group
            (the trainer and this replica's workers), ``bucket_bytes``, and ``timeout_seconds`` to meet the trainer and
            for each transfer.
        rank: of this worker, from 1 on.
    """

    def __init__(self, options: Mapping[str, Any], rank: int) -> None:
        self._timeout = float(options["timeout_seconds"])
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._held: Manifest | None = None
        self._lock = threading.Lock()  # of the buffer
        meeting = ThreadPoolExecutor(1, thread_name_prefix="weight-meeting")
        self._group = meeting.submit(_join, dict(options), rank)
        meeting.shutdown(wait=False)  # the thread ends with its job

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
            yield {entry.name: _tensor(self._buffer, entry) for entry in manifest.entries}

    def close(self) -> None:
        """Leave the group; a receiver that still waits gets an error. Idempotent."""
        self._group.add_done_callback(lambda _: self._leave())
        self._held = None


def _join(options: Mapping[str, Any], rank: int) -> GlooGroup:
    timeout = options["timeout_seconds"]
    store = join_rendezvous(options["address"], options["port"], timeout)
    return GlooGroup(store, rank, options["world_size"], timeout, options["bucket_bytes"])


def _tensor(flat: Tensor, entry: TensorEntry) -> Tensor:
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
        while self._left and self._left[-1].offset + self._left[-1].nbytes <= count:
            whole.append(self._left.pop())
        if self._pool is not None:
            self._jobs.append(self._pool.submit(self._compare, whole))

    def _compare(self, entries: list[TensorEntry]) -> None:
        for entry in entries:
            if xxhash.xxh3_64_hexdigest(self._bytes[entry.offset : entry.offset + entry.nbytes].data) != entry.digest:
                raise DigestMismatch(
                    f"version {self._version}: bytes of {entry.name} are not those published; publish it again"
                )

    def result(self) -> None:
        """Raise what was found."""
        for job in self._jobs:
            job.result()
