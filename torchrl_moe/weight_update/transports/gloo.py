"""The trainer's end of the gloo transport: one communicator per replica, over which the store's bytes are broadcast.

A replica announces that it will read before anything is sent, so that one that refuses a version costs nobody a
deadline. A group in which anything failed is given up, and made again for the next version: the other replicas have
their own, and notice nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch
from torch import Tensor

from torchrl_moe._errors import SyncTimeout, TorchRLMoEError, WeightSyncError
from torchrl_moe.data.gloo_group import BUCKET_BYTES, TRAINER, GlooGroup, open_rendezvous
from torchrl_moe.data.weight_store import Manifest, WeightStoreReader
from torchrl_moe.modules.backends.replica import Replica
from torchrl_moe.modules.backends.reports import StageReport
from torchrl_moe.weight_update.transports.transport import StageOptions

__all__ = ["GlooTransport"]

RANK_OFFSET = 1  # of a replica's workers, behind the trainer
POLL_SECONDS = 0.002
GRACE_SECONDS = 5.0  # that a replica gets to say why a transfer failed


class GlooTransport:
    """Sends versions by broadcast, each replica's by itself.

    Args:
        folder: of the weight store, whose slots are sent as they lie there.
        address: where to meet; the replicas must reach it. Loopback by default.
        bucket_bytes: sent at a time.
        device: of the trainer; only the CPU has a meaning here.

    Raises:
        ValueError: another device than the CPU.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        address: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(f"device={str(device)!r}: transport='gloo' sends from the CPU; 'nccl' sends from a GPU")
        self._reader = WeightStoreReader(os.fspath(folder))
        self._address, self._bucket_bytes = address, bucket_bytes
        self._groups: weakref.WeakKeyDictionary[Replica, GlooGroup] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def open(self, replica: Replica, timeout: float) -> None:
        """Meet a replica's workers; in place of a group from before.

        Raises:
            SyncTimeout: they did not come in time.
            EngineError: the replica does not answer.
            WeightSyncError: nobody can meet there: the address is not this host's, or the interface does not exist.
        """
        self._drop(replica)
        workers = replica.wait_ready(timeout).tensor_parallel_size
        try:
            group = self._meet(replica, workers, timeout)
        except TorchRLMoEError:  # one of which is an OSError too
            raise
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(f"no gloo group at {self._address}: {error}") from None
        with self._lock:
            self._groups[replica] = group

    def _meet(self, replica: Replica, workers: int, timeout: float) -> GlooGroup:
        store = open_rendezvous(self._address, timeout)
        options = {
            "address": self._address,
            "port": store.port,
            "world_size": workers + RANK_OFFSET,
            "rank_offset": RANK_OFFSET,
            "timeout_seconds": timeout,
            "bucket_bytes": self._bucket_bytes,
        }
        replica.init_weights("gloo", options, timeout)
        return GlooGroup(store, TRAINER, workers + RANK_OFFSET, timeout, self._bucket_bytes)

    def _drop(self, replica: Replica) -> None:
        with self._lock:
            group = self._groups.pop(replica, None)
        if group is not None:
            group.close()

    def stage(self, replica: Replica, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
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
