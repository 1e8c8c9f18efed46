"""The receiver of the memmap transport: the weight store of this host."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from torchrl_moe.data.weight_store import Manifest, WeightStoreReader

__all__ = ["MemmapReceiver"]


class MemmapReceiver:
    """Reads the store in place: there is nothing to fetch.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: str) -> None:
        self._reader = WeightStoreReader(folder)

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a published version."""
        return self._reader.manifest(version)

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Do nothing: the bytes are here, and compared as they are read; else the engine process compares them."""

    def reading(self, manifest: Manifest, *, verify: bool = False) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Give the tensors as they lie in the store."""
        return self._reader.reading(manifest, verify)

    def close(self) -> None:
        """Nothing is held between two readings."""
