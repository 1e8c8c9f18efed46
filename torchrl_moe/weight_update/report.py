"""What a weight update did, replica by replica."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ReplicaSync", "SyncReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSync:
    """One replica's part: seconds until it could be taken out of service, checking, paused, loading; or its error."""

    replica: int
    waited: float = 0.0
    fetched: float = 0.0
    paused: float = 0.0
    loaded: float = 0.0
    attempts: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One version on its way to all replicas.

    Attributes:
        version: what was sent.
        nbytes: bytes of all tensors.
        digest: of names, dtypes, shapes and bytes.
        published: seconds to write it.
        replicas: one entry each, in order.
    """

    version: int
    nbytes: int
    digest: str
    published: float
    replicas: tuple[ReplicaSync, ...] = field(default=())

    @property
    def failed(self) -> dict[int, str]:
        """Replicas that do not hold the version, and why."""
        return {entry.replica: entry.error for entry in self.replicas if entry.error is not None}

    @property
    def seconds(self) -> float:
        """From publishing to the last replica: they check at the same time, and are swapped one after another."""
        checked = max((entry.fetched for entry in self.replicas), default=0.0)
        return self.published + checked + sum(entry.waited + entry.paused for entry in self.replicas)

    def __repr__(self) -> str:
        paused = max((entry.paused for entry in self.replicas), default=0.0)
        good = len(self.replicas) - len(self.failed)
        return (
            f"SyncReport(version={self.version}, replicas={good}/{len(self.replicas)}, {self.nbytes / 1e6:.1f} MB, "
            f"{self.seconds:.3f} s, longest pause {paused:.3f} s, digest={self.digest[:8]})"
        )
