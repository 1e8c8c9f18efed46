"""The transport without a transfer: replicas map the weight store themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torchrl_moe.data.weight_store import Manifest
from torchrl_moe.modules.backends.replica import Replica
from torchrl_moe.modules.backends.reports import StageReport
from torchrl_moe.weight_update.transports.transport import StageOptions

__all__ = ["MemmapTransport"]


class MemmapTransport:
    """See :class:`~torchrl_moe.weight_update.transports.transport.Transport`.

    Args:
        folder: of the weight store, as the replicas see it.
        holding: whole weights (``"memmap"``), or adapters (``"adapter"``).
    """

    def __init__(self, folder: Path, holding: Literal["memmap", "adapter"] = "memmap") -> None:
        self.folder, self._holding = folder, holding

    def open(self, replica: Replica, timeout: float) -> None:
        """Tell a replica where the store is."""
        replica.init_weights(self._holding, {"folder": str(self.folder)}, timeout)

    def stage(self, replica: Replica, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        """Let a replica read a version."""
        return replica.stage_weights(
            manifest.version,
            stage=options.stage,
            verify=options.verify,
            threads=options.threads,
            manifest=None,
            timeout=timeout,
        )

    def close(self) -> None:
        """Nothing is held."""
