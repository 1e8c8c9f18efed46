"""The transport without a transfer: replicas map the weight store themselves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from torch import Tensor

from torchrl_moe.weight_update.store import Manifest, WeightStoreReader
from torchrl_moe.weight_update.transports.base import Peer, StageOptions, StageReport

__all__ = ["MemmapReceiver", "MemmapTransport"]


class MemmapTransport:
    """The trainer's end; see :class:`~torchrl_moe.weight_update.transports.base.Transport`.

    Args:
        folder: of the weight store, as the replicas see it.
        holding: whole weights (``"memmap"``), or adapters (``"adapter"``).
    """

    def __init__(self, folder: Path, holding: Literal["memmap", "adapter"] = "memmap") -> None:
        self.folder, self._holding = folder, holding

    def open(self, replica: Peer, timeout: float) -> None:
        """Tell a replica where the store is."""
        replica.init_weights(self._holding, {"folder": str(self.folder)}, timeout)

    def stage(self, replica: Peer, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        """Let a replica read a version."""
        return replica.stage_weights(
            manifest.version,
            verify=options.verify,
            threads=options.threads,
            manifest=None,
            timeout=timeout,
        )

    def close(self) -> None:
        """Do nothing: nothing is held."""


class MemmapReceiver:
    """A worker's end, which reads the store in place.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: str) -> None:
        self._reader = WeightStoreReader(folder)

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a published version."""
        return self._reader.manifest(version)

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Do nothing: the version is there, and the engine process compares its digests."""

    def reading(self, manifest: Manifest) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Yield the tensors as they are in the store."""
        return self._reader.reading(manifest)

    def close(self) -> None:
        """Unmap the store. Idempotent."""
        self._reader.close()
