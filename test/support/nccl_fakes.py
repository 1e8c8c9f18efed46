"""NCCL in memory: groups whose transfers wait for ever, and replicas whose workers receive by them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchrl_moe._errors import WeightSyncError
from torchrl_moe.modules.backends.reports import ReplicaInfo
from torchrl_moe.testing.fake_weights import FakeWeightReplica
from torchrl_moe.weight_update.store import Manifest
from torchrl_moe.weight_update.transports.base import StageReport
from torchrl_moe.weight_update.transports.nccl import NcclReceiver
from torchrl_moe.weight_update.transports.nccl_group import Transfer
from torchrl_moe.weight_update.transports.registry import open_receiver


class FakeGroup:
    """In the place of NCCL: a transfer is done when its peers take part in it, and if they do not, it never is.

    ``made`` are all groups. ``spoil`` changes what arrives.
    """

    made: list[FakeGroup]

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: Any, deadline: float, lost: Any) -> None:
        del device, deadline, lost
        self.unique_id, self.rank, self.world_size = unique_id, rank, world_size
        self.aborted = threading.Event()
        self.sent: list[Tensor] = []
        self.taken = 0
        self.spoil: Callable[[Tensor], Tensor] = lambda flat: flat
        FakeGroup.made.append(self)

    def _peers(self) -> list[FakeGroup]:
        return [group for group in FakeGroup.made if group.unique_id == self.unique_id and group is not self]

    def send(self, flat: Tensor) -> Transfer:
        """Begin to send."""
        self._check()
        self.sent.append(flat.clone())
        mine = len(self.sent)

        def is_done() -> bool:
            workers = self._peers()
            return len(workers) == self.world_size - 1 and all(worker.taken >= mine for worker in workers)

        return Transfer(self.sent[-1], is_done)

    def receive(self, size: int) -> Transfer:
        """Begin to receive."""
        self._check()
        flat, mine = torch.empty(size, dtype=torch.uint8), self.taken
        self.taken += 1
        (trainer,) = [group for group in self._peers() if group.rank == 0]

        def is_done() -> bool:
            if len(trainer.sent) > mine:
                flat.copy_(self.spoil(trainer.sent[mine]))
                return True
            return False

        return Transfer(flat, is_done)

    def _check(self) -> None:
        if self.aborted.is_set():
            raise WeightSyncError("the NCCL group was given up")

    def abort(self) -> None:
        """Take part in nothing any more."""
        self.aborted.set()


class FakeModel:
    """A worker's model; ``take`` is called with each tensor's name before it is loaded."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.take: Callable[[str], None] = lambda name: None

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Copy what comes."""
        for name, tensor in weights:
            self.take(name)
            self.loaded[name] = tensor.clone()


class GpuReplica(FakeWeightReplica):
    """A fake whose workers say that they have GPUs; each receives into a model of its own.

    Args:
        workers: of each data parallel rank.
        data_parallel: how many such ranks.
        devices: of the workers; by default none has one.
    """

    def __init__(self, workers: int = 2, data_parallel: int = 1, devices: tuple[int, ...] = ()) -> None:
        super().__init__(workers=workers, expected=None)
        self.data_parallel, self.devices = data_parallel, devices
        self.models = [FakeModel() for _ in range(workers * data_parallel)]
        self.ends: list[NcclReceiver] = []

    def wait_ready(self, timeout: float) -> ReplicaInfo:
        """Serve at once."""
        return replace(super().wait_ready(timeout), data_parallel_size=self.data_parallel)

    def command_init_weights(self, epoch: int, transport: str, options: Mapping[str, Any]) -> None:
        """Meet the trainer, all workers at the same time."""
        self.owner.check(epoch)
        assert transport == "nccl"
        with ThreadPoolExecutor(len(self.models)) as pool:
            self.ends = list(pool.map(lambda number: self._join(options, number), range(len(self.models))))

    def _join(self, options: Mapping[str, Any], number: int) -> NcclReceiver:
        index, rank = divmod(number, self._workers)
        device = torch.device("cuda", self.devices[number] if self.devices else None)
        if self.devices:
            torch.cuda.set_device(device)
        place = SimpleNamespace(data_parallel_index=index, world_size=self._workers, rank=rank)
        end = open_receiver(
            "nccl", options, SimpleNamespace(device=device, parallel_config=place, model=self.models[number])
        )
        assert isinstance(end, NcclReceiver)
        return end

    def command_stage_weights(
        self, epoch: int, version: int, verify: str, threads: int, manifest: str | None
    ) -> StageReport:
        """Note what comes."""
        for end in self.ends:
            end.fetch(Manifest.from_json(manifest or ""), verify=verify == "digest", threads=threads)
        return StageReport(seconds=0.0, nbytes=0, digest=f"of {version}")

    def load(self, manifest: Manifest) -> list[int]:
        """Do what a swap does in the workers, and return how many tensors each took."""
        with ThreadPoolExecutor(len(self.ends)) as pool:
            return list(pool.map(lambda end: end.load(manifest), self.ends))
