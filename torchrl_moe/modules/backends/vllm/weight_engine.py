"""The worker's side of a weight update: vLLM's own weight-transfer interface, dispatching to a transport of ours.

vLLM asks for the backend at start-up, before a transport is chosen; so every engine starts with this one, and init
names the transport. ``memmap`` reads a version from the weight store of the same host. An update is one bracket of
vLLM's layerwise reload: start takes the layers apart, each is put together when its last tensor arrives, finish does
the rest.

Imported in vLLM's worker processes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from torchrl_moe import _compat
from torchrl_moe.data.weight_store import WeightStoreReader

__all__ = ["InitInfo", "UpdateInfo", "WeightEngine"]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Which transport, and where its weights are."""

    transport: str
    folder: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to load."""

    version: int


class WeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads versions of the weights into the worker's model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader: WeightStoreReader | None = None
        self._kernels: list[tuple[Any, Any]] = []

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the transport."""
        if init_info.transport != "memmap":
            raise ValueError(f"unknown transport {init_info.transport!r}; the worker has 'memmap'")
        self._reader = WeightStoreReader(init_info.folder)

    def start_weight_update(self) -> None:
        """Take the layers apart.

        On CPU the packed expert kernels are dropped too: vLLM 0.30 skips packing while one exists, and the experts
        would then be read in the wrong layout.
        """
        if self.device.type == "cpu":
            self._kernels += _compat.take_moe_kernels(self.model)
        _compat.forget_half_loads(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a version. The driver has checked names, shapes and digests before."""
        if self._reader is None:
            raise RuntimeError("the weight transport is not initialised")
        manifest = self._reader.manifest(update_info.version)
        with self._reader.reading(manifest) as tensors:
            given = 0

            def stream() -> Iterator[tuple[str, Tensor]]:
                nonlocal given
                for name, tensor in tensors.items():
                    given += 1
                    yield name, tensor

            self.model.load_weights(stream())
        if given != len(manifest.entries):
            raise RuntimeError(
                f"the model took {given} of {len(manifest.entries)} tensors of version {manifest.version}"
            )

    def finish_weight_update(self) -> None:
        """Put together what is left, and give experts that were not loaded their kernels back."""
        finalize_layerwise_reload(self.model, self.model_config)
        _compat.restore_moe_kernels(self._kernels)
        self._kernels = []

    def shutdown(self) -> None:
        """Nothing is held."""
