"""What the sender knows of a transport: a protocol.

Whatever the transport, a version is published to the host's weight store first: a late or restarted replica can have it
too, and a collective transport sends the store's flat bytes as they lie there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torchrl_moe.data.weight_store import Manifest
from torchrl_moe.modules.backends.replica import Replica
from torchrl_moe.modules.backends.reports import StageReport

__all__ = ["StageOptions", "Transport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """How a replica prepares a version while it serves.

    Attributes:
        stage: ``"shadow"`` loads it into a second model, ``"plain"`` leaves the loading to the pause, ``"auto"`` is
            shadow where that works.
        verify: ``"digest"`` hashes every byte that arrived; ``"canary"`` and ``"off"`` do not.
        threads: that read and hash.
    """

    stage: Literal["auto", "shadow", "plain"] = "auto"
    verify: Literal["digest", "canary", "off"] = "digest"
    threads: int = 1


class Transport(Protocol):
    """One way from the trainer to replicas. Its methods may be called for several replicas at the same time."""

    def open(self, replica: Replica, timeout: float) -> None:
        """Make a replica ready to take versions; once for each replica object, a restarted one included."""

    def stage(self, replica: Replica, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        """Bring a version to a replica while it serves; nothing of it is used yet."""

    def close(self) -> None:
        """Let go of all replicas. Idempotent."""
