"""The lease: a request's claim on a replica, which counts its load exactly once."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from torchrl_moe.modules.serving.replica_table import ReplicaTable, TableEntry

__all__ = ["Lease"]


class Lease:
    """One request's claim on a replica. Release it when the request is over; a second release has no effect.

    Attributes:
        index: the replica.
        version: the weight version that it held when the lease was granted.
        replica: the replica object; a restart may have replaced it before the lease is used.
    """

    __slots__ = ("_over", "_table", "_trial", "index", "replica", "version")

    def __init__(
        self, table: ReplicaTable, entry: TableEntry, trial: bool, over: Callable[[bool | None], object] | None
    ) -> None:
        self._table: ReplicaTable | None = table
        self._trial = trial
        self._over = over
        self.index = entry.index
        self.version = entry.version
        self.replica = entry.replica

    def release(self, success: bool | None = True) -> None:
        """Release the claim.

        Args:
            success: whether the replica answered; ``None`` if nothing was sent, or the request was aborted.
        """
        table = self._table
        if table is None:
            return
        with table.lock:  # two threads may both have come this far
            if self._table is not None:
                self._table = None
                table.give_back(self.index, self._trial, success)
                if self._over is not None:
                    self._over(success)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease(replica={self.index}, version={self.version}, {'held' if self._table else 'released'})"
