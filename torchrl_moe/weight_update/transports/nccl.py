"""The trainer's end of the nccl transport: one communicator per replica, from GPU to GPU.

The bytes go straight into the replica's model, so they go during its pause: staging only checks names, and leaves a
thread that sends when the replica's workers say that they wait.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
import weakref
from typing import Any

import torch

from torchrl_moe._errors import TorchRLMoEError, WeightSyncError
from torchrl_moe.data.weight_store import Manifest, WeightStoreReader
from torchrl_moe.modules.backends.replica import Replica
from torchrl_moe.modules.backends.reports import StageReport
from torchrl_moe.weight_update.transports.transport import StageOptions

__all__ = ["NcclTransport"]

POLL_SECONDS = 0.005


class NcclTransport:
    """Sends versions by NCCL, with vLLM's engines at both ends.

    NCCL itself has no deadline: a replica that stalls is found by the deadline of the swap, and ended.

    Args:
        folder: of the weight store.
        address: where to meet; the replicas must reach it. Loopback by default.
        device: the trainer's GPU.

    Raises:
        WeightSyncError: torch sees no GPU.
    """

    def __init__(
        self, folder: str | os.PathLike[str], address: str = "127.0.0.1", device: torch.device | str = "cuda"
    ) -> None:
        if not torch.cuda.is_available():
            raise WeightSyncError(
                "transport='nccl' needs a CUDA device in the trainer, and torch sees none: use transport='gloo', or "
                "'memmap' on one host"
            )
        self._reader = WeightStoreReader(os.fspath(folder))
        self._address, self._device = address, torch.device(device)
        self._links: weakref.WeakKeyDictionary[Replica, _Link] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def open(self, replica: Replica, timeout: float) -> None:
        """Meet a replica's workers; in place of a group from before.

        Raises:
            EngineError: the replica does not answer.
        """
        from torchrl_moe.modules.backends.vllm.nccl_trainer import NcclTrainer

        self._drop(replica)
        world_size = replica.wait_ready(timeout).tensor_parallel_size + 1

        known = weakref.ref(replica)  # what the link keeps must not keep the replica

        def init(options: dict[str, Any]) -> None:
            if (there := known()) is not None:
                there.init_weights("nccl", options, timeout)

        trainer = NcclTrainer(init, self._address, _free_port(self._address), world_size, self._device)
        link = _Link(trainer, self._reader)
        weakref.finalize(replica, link.close)  # a replica that was restarted leaves a link behind, and its thread
        with self._lock:
            self._links[replica] = link

    def _drop(self, replica: Replica) -> None:
        with self._lock:
            link = self._links.pop(replica, None)
        if link is not None:
            link.close()

    def stage(self, replica: Replica, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        """Let a replica check a version, and be ready to send it; they meet again if that broke before."""
        link = self._links.get(replica)
        if link is None or link.broken:
            self.open(replica, timeout)
        report = replica.stage_weights(
            manifest.version,
            stage=options.stage,
            verify="off",  # nothing is there yet that could be hashed
            threads=options.threads,
            manifest=manifest.to_json(),
            timeout=timeout,
        )
        self._links[replica].offer(manifest)
        return report

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        for replica in list(self._links):
            self._drop(replica)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


class _Link:
    """A replica's group, and the thread that sends it what is offered as often as it asks.

    Once it is ``broken`` it sends no more.

    Args:
        trainer: a :class:`~torchrl_moe.modules.backends.vllm.nccl_trainer.NcclTrainer`.
        reader: of the weight store.
    """

    def __init__(self, trainer: Any, reader: WeightStoreReader) -> None:
        self._trainer, self._reader = trainer, reader
        self._offered: Manifest | None = None
        self.broken = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)
        self._thread.start()

    def offer(self, manifest: Manifest) -> None:
        """Send this version from now on."""
        self._offered = manifest

    def _run(self) -> None:
        try:
            self._send_when_asked()
        except (RuntimeError, OSError, ValueError, TorchRLMoEError) as error:
            traceback.print_exception(error)  # nobody waits here; the replica is found by its deadline
            self.broken = True

    def _send_when_asked(self) -> None:
        load = 0
        while not self._closed.wait(POLL_SECONDS):
            if self._offered is None or not self._trainer.is_ready(load):
                continue
            with self._reader.reading(self._offered) as tensors:
                self._trainer.send(tensors)
            load += 1

    def close(self) -> None:
        """Stop sending and leave the group."""
        self._closed.set()
        if threading.current_thread() is not self._thread:  # which may be the one that collects a replica
            self._thread.join(1.0)
        self._trainer.close()
