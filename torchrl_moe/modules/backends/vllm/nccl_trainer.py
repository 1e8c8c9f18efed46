"""The trainer's rank of one replica's NCCL group: vLLM's own trainer engine, told when to send.

vLLM's engine drives the whole update of a replica by itself. Here the replica does that, so the engine is given a
client whose steps do nothing, and only its rendezvous and its broadcast are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

__all__ = ["NcclTrainer", "ready_key"]


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


class _Source(WeightSource):
    """The tensors of the version that is sent now, which go to the GPU one by one."""

    def __init__(self, device: torch.device) -> None:
        self.tensors: Mapping[str, Tensor] = {}
        self._device = device

    def metadata(self) -> list[ParamMeta]:
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
