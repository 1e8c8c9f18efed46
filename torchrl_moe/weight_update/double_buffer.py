"""``VLLMDoubleBufferSyncScheme``: TorchRL's name and halves, over a directory of versions.

TorchRL's sender writes into a directory and its receiver reads from it, in another process perhaps, with nothing to
tell a whole version from half of one. Here the directory is a weight store: the receiver finds the newest whole
version, checks it, and swaps it in replica by replica.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torchrl_moe._errors import WeightSyncError
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.weight_update.options import SyncOptions, one_of
from torchrl_moe.weight_update.publishing import Published
from torchrl_moe.weight_update.report import SyncReport
from torchrl_moe.weight_update.rolling import RollingSwap, waits_for_update
from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme
from torchrl_moe.weight_update.sender import WeightSender
from torchrl_moe.weight_update.source.layout import Weights
from torchrl_moe.weight_update.store import WeightStoreReader
from torchrl_moe.weight_update.transports.memmap import MemmapTransport

__all__ = ["VLLMDoubleBufferSyncScheme", "WeightReceiver"]


class VLLMDoubleBufferSyncScheme(VLLMWeightSyncScheme):
    """A weight sync through a directory, with TorchRL's arguments.

    Args:
        remote_addr: the directory as the trainer sees it.
        local_addr: the same as the engines see it, if that differs.
        num_threads: how many threads of a replica read a version.
        strategy: TorchRL's; both of its ways take the same weights.

    Raises:
        ValueError: an unknown strategy, or fewer than one thread.

    Example::

        sender = VLLMDoubleBufferSyncScheme("/mnt/weights").create_sender()        # the trainer's process
        sender.register_model(actor)
        sender.publish()

        receiver = VLLMDoubleBufferSyncScheme("/mnt/weights").create_receiver(engine)  # the engine's, or the same
        receiver.poll_and_apply()
    """

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
    ) -> None:
        one_of("strategy", strategy, ("tensordict", "state_dict"))
        super().__init__(folder=remote_addr, layout="versions", prefetch=num_threads)
        if local_addr is not None:
            self.options = replace(self.options, store=replace(self.options.store, seen_as=Path(local_addr)))

    def create_sender(self) -> WeightSender:
        """Return the trainer's side."""
        return _DirectorySender(self.options, self.shutdown)

    def create_receiver(self, vllm_engine: Any) -> WeightReceiver:
        """Return the engine's side, for a trainer that has no engine."""
        return WeightReceiver(self.options, vllm_engine)


class _DirectorySender(WeightSender):
    """A sender that, like TorchRL's, may know no engine: it writes, and a receiver looks."""

    def update_weights(self, weights: Weights | None = None) -> SyncReport:
        """Write a version, and bring it to the engine if one is known."""
        if self.has_engine:
            return super().update_weights(weights)
        self.publish(weights)
        return self.report_published()


class WeightReceiver:
    """Takes versions from a directory into an engine, when it is asked to look, or when a replica was restarted.

    Args:
        options: say where.
        vllm_engine: an ``AsyncVLLM``.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, options: SyncOptions, vllm_engine: Any) -> None:
        if not isinstance(vllm_engine, GenerationService):
            raise ValueError(f"vllm_engine must be an AsyncVLLM, got {type(vllm_engine).__name__}")
        self._engine = vllm_engine
        seen_as = options.store.seen_as
        self._store = WeightStoreReader(seen_as)
        self._swap = RollingSwap(vllm_engine, MemmapTransport(seen_as), options.staging, options.swapping)
        self._lock = threading.Lock()
        self.report: SyncReport | None = None
        if vllm_engine.weight_sync is None:  # a sender that knows the engine does it itself
            vllm_engine.register_weight_sync(self.bring)

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Bring all replicas to the newest version, if it is newer than what one of them holds.

        Args:
            timeout: TorchRL's; the scheme has the deadlines.

        Returns:
            Whether there was one. :attr:`report` has the details.

        Raises:
            WeightSyncError: fewer than ``min_serving`` replicas hold it.
        """
        del timeout
        with self._lock:
            newest = self._store.newest() or 0
            late = [e.index for e in self._engine.replica_table if waits_for_update(e) and e.version < newest]
            if not late:
                return False
            self.report = self._apply(newest, late)
            if len(self.report.failed) == len(late):
                self._swap.give_up()  # perhaps others took them; the next look claims those that nobody has
            self._swap.check_serving(self.report)
            return True

    def bring(self, index: int) -> None:
        """Bring a replica that is STARTING to the newest version, and to SERVING; what was restarted needs it.

        Raises:
            WeightSyncError: it does not hold the version.
        """
        with self._lock:
            newest = self._store.newest()
            if newest is None:  # nothing was sent yet: the checkpoint is what all have
                self._swap.serves(index)
                return
            if failed := self._apply(newest, [index]).failed:
                raise WeightSyncError(f"replica {index} was not brought to version {newest}: {failed[index]}")

    def _apply(self, version: int, indices: Sequence[int]) -> SyncReport:
        published = Published(version=version, manifest=self._store.manifest(version), began=time.perf_counter())
        staged = self._swap.stage(published, indices)
        return published.report(tuple(self._swap.swap(published, staged, indices)))

    def apply_weights(self, weights: Mapping[str, Any] | None = None, inplace: bool = True) -> None:
        """TorchRL's name of :meth:`poll_and_apply`; weights come from the directory only."""
        if weights is not None or not inplace:
            raise ValueError("apply_weights: the receiver takes what the sender published, in place; pass nothing")
        self.poll_and_apply()
