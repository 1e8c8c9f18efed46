"""The nccl transport: one communicator per replica, from GPU to GPU, with vLLM's own NCCL engines at both ends.

The bytes go straight into the replica's model, so they go during its pause: staging only checks names, and leaves a
thread that sends when the replica's workers say that they wait. Written to the interface of vLLM 0.28 to 0.33; it takes
two GPUs to run.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchrl_moe._errors import ManifestMismatch, TorchRLMoEError, WeightSyncError
from torchrl_moe.weight_update.store import Manifest, WeightStoreReader
from torchrl_moe.weight_update.transports.base import Peer, StageOptions, StageReport

__all__ = ["NcclReceiver", "NcclTrainer", "NcclTransport", "ready_key", "update_info"]

POLL_SECONDS = 0.005
OURS = {"timeout_seconds"}  # options that vLLM's engine does not know

# -- the trainer's end ------------------------------------------------------------------------------------------------


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
        self._links: weakref.WeakKeyDictionary[Peer, _Link] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def open(self, replica: Peer, timeout: float) -> None:
        """Meet a replica's workers; in place of a group from before.

        Raises:
            EngineError: the replica does not answer.
        """
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

    def _drop(self, replica: Peer) -> None:
        with self._lock:
            link = self._links.pop(replica, None)
        if link is not None:
            link.close()

    def stage(self, replica: Peer, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
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
        trainer: a :class:`NcclTrainer`.
        reader: of the weight store.
    """

    def __init__(self, trainer: NcclTrainer, reader: WeightStoreReader) -> None:
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


def ready_key(load: int, rank: int) -> str:
    """Return the key of the group's store by which a worker says that it begins its ``load``-th load."""
    return f"torchrl_moe/ready/{load}/{rank}"


class NcclTrainer:
    """Meets a replica's workers, and sends them versions.

    Args:
        init: has the workers join: takes the fields of vLLM's ``NCCLWeightTransferInitInfo``.
        address: where to meet.
        port: a free one there.
        world_size: the trainer and the replica's workers.
        device: the trainer's GPU.
    """

    def __init__(
        self, init: Callable[[dict[str, Any]], None], address: str, port: int, world_size: int, device: torch.device
    ) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self._source, self._device, self._world_size = _Source(device), device, world_size
        info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=world_size, rank=0)
        with torch.cuda.device(device):
            self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=_Client(init), source=self._source)

    def is_ready(self, load: int) -> bool:
        """Whether all workers have begun their ``load``-th load, and so wait for the bytes."""
        communicator: Any = self._engine.model_update_group
        keys = [ready_key(load, rank) for rank in range(1, self._world_size)]
        return bool(communicator.group.store.check(keys))

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast tensors in their order, and wait until they are sent."""
        self._source.tensors = tensors
        with torch.cuda.device(self._device):
            self._engine.send_weights()
        self._source.tensors = {}

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._engine.shutdown()


class _Source:
    """The tensors of the version that is sent now, as vLLM's ``WeightSource``; they go to the GPU one by one."""

    def __init__(self, device: torch.device) -> None:
        self.tensors: Mapping[str, Tensor] = {}
        self._device = device

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.to(self._device)


class _Client:
    """What vLLM's engine calls of a replica: only the rendezvous is left to it."""

    def __init__(self, init: Callable[[dict[str, Any]], None]) -> None:
        self.init_weight_transfer_engine = init

    def start_weight_update(self) -> None:
        """The replica does that itself."""

    def update_weights(self, update_info: Any) -> None:
        """The same."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The same."""


# -- a worker's end ---------------------------------------------------------------------------------------------------


def update_info(manifest: Manifest) -> dict[str, list[Any]]:
    """Return the fields of vLLM's ``NCCLWeightTransferUpdateInfo``.

    >>> from torchrl_moe.weight_update.store import Manifest
    >>> update_info(Manifest(version=1, slot=0, entries=()))
    {'names': [], 'dtype_names': [], 'shapes': []}
    """
    return {
        "names": [entry.name for entry in manifest.entries],
        "dtype_names": [entry.dtype for entry in manifest.entries],
        "shapes": [list(entry.shape) for entry in manifest.entries],
    }


class NcclReceiver:
    """Receives versions and loads them at the same time, by :meth:`load`.

    Args:
        options: the fields of vLLM's ``NCCLWeightTransferInitInfo``.
        rank: of this worker in the group.
        worker: our weight engine, for what vLLM's engine wants to know.

    Raises:
        WeightSyncError: the worker has no GPU.
    """

    loads_during_pause = "nccl sends during the pause"

    def __init__(self, options: Mapping[str, Any], rank: int, worker: Any) -> None:
        if worker.device.type != "cuda":
            raise WeightSyncError(
                f"transport='nccl' needs workers with GPUs, this one computes on {worker.device.type}: use 'gloo'"
            )
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo

        self._rank, self._loads = rank, 0
        self._model = _Counting(worker.model)
        self._engine = NCCLWeightTransferEngine(worker.config, worker.vllm_config, worker.device, self._model)
        fields = {name: value for name, value in options.items() if name not in OURS}
        self._engine.init_transfer_engine(NCCLWeightTransferInitInfo(**fields))

    def manifest(self, version: int) -> Manifest:
        """Refuse: only what was staged has a manifest here."""
        raise ManifestMismatch(f"version {version} was not staged")

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Do nothing: the bytes come when :meth:`load` asks for them."""

    def reading(self, manifest: Manifest, *, verify: bool = False) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Refuse: nothing is held."""
        del verify
        raise WeightSyncError(f"version {manifest.version} is not held here: {self.loads_during_pause}")

    def load(self, manifest: Manifest) -> int:
        """Say that this worker waits, receive a version into the model, and return how many tensors it took."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        self._model.taken = 0
        communicator: Any = self._engine.model_update_group
        communicator.group.store.set(ready_key(self._loads, self._rank), b"")
        self._loads += 1
        self._engine.receive_weights(NCCLWeightTransferUpdateInfo(**update_info(manifest)))
        return self._model.taken

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._engine.shutdown()


class _Counting:
    """A model, as far as vLLM's engine loads it, that counts what it takes."""

    def __init__(self, model: Any) -> None:
        self.taken = 0
        self._model = model

    def load_weights(self, weights: Any) -> Any:
        listed = list(weights)
        self.taken += len(listed)
        return self._model.load_weights(iter(listed))
