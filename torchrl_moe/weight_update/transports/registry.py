"""Maps a name to a transport, at either end; only that one is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Replica, StageReport, SwapReport
from torchrl_moe.store import Manifest, WeightStoreReader
from torchrl_moe.weight_update.transports.base import Receiver, StageOptions, Transport, rank_of


class MemmapTransport:
    """The trainer's end of the transport without a transfer: replicas map the weight store themselves."""

    def __init__(self, folder: Path, holding: Literal["memmap", "adapter"] = "memmap") -> None:
        self.folder, self._holding = folder, holding

    def open(self, replica: Replica, timeout: float) -> None:
        replica.call(Engine.init_weights, timeout, self._holding, {"folder": str(self.folder)})

    def stage(self, replica: Replica, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        return replica.call(Engine.stage_weights, timeout, manifest.version, options.verify, options.threads, None)

    def swapping(self, replica: Replica, manifest: Manifest, swap: Callable[[], SwapReport]) -> SwapReport:
        """Swap: the bytes are there."""
        del replica, manifest
        return swap()

    def close(self) -> None:
        """Do nothing: nothing is held."""


class MemmapReceiver:
    """A worker's end, which reads the store in place."""

    def __init__(self, folder: str) -> None:
        self._reader = WeightStoreReader(folder)

    def manifest(self, version: int) -> Manifest:
        return self._reader.manifest(version)

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Map the version's files, which are there; the engine process compares its digests."""
        del verify, threads
        with self._reader.reading(manifest):
            pass

    def reading(self, manifest: Manifest) -> AbstractContextManager[Mapping[str, Tensor]]:
        return self._reader.reading(manifest)

    def close(self) -> None:
        self._reader.close()


def open_transport(
    name: str,
    folder: Path,
    seen_as: Path | None = None,
    device: torch.device | None = None,
    buffer_bytes: int | None = None,
    **of_nccl: Any,
) -> Transport:
    """Return the trainer's end of a transport; ``of_nccl``: further arguments of that one."""
    if name == "memmap":
        return MemmapTransport(seen_as or folder)
    if name == "adapter":
        return MemmapTransport(seen_as or folder, "adapter")
    if name == "gloo":
        from torchrl_moe.weight_update.transports.gloo import GlooTransport

        return GlooTransport(folder, device or "cpu", buffer_bytes)
    if name == "nccl":
        from torchrl_moe.weight_update.transports.nccl import NCCLTransport

        return NCCLTransport(folder, device, buffer_bytes=buffer_bytes, **of_nccl)
    raise ValueError(f"unknown transport {name!r}; there are 'memmap', 'adapter', 'gloo' and 'nccl'")


def open_receiver(name: str, options: Mapping[str, Any], worker: Any = None) -> Receiver:
    if name == "memmap":
        return MemmapReceiver(**options)
    if name == "gloo":
        from torchrl_moe.weight_update.transports.gloo import GlooReceiver

        return GlooReceiver(options, rank_of(worker.parallel_config, options["rank_offset"]))
    if name == "nccl":
        from torchrl_moe.weight_update.transports.nccl import NCCLReceiver

        return NCCLReceiver(options["init"], worker)
    raise ValueError(f"unknown transport {name!r}; the worker has 'memmap', 'gloo' and 'nccl'")
