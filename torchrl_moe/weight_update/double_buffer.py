"""``VLLMDoubleBufferSyncScheme``: TorchRL's name and halves, over a directory of versions.

The sender writes into the directory and the receiver, perhaps in another process, reads from it. The directory is a
weight store, where TorchRL's cannot tell a complete version from a partial one: the receiver finds the newest complete
version, checks it, and swaps it in replica by replica.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchrl_moe.errors import ManifestMismatch, WeightSyncError
from torchrl_moe.store import WeightStoreReader
from torchrl_moe.store.content import check_digest
from torchrl_moe.weight_update.publishing import Published
from torchrl_moe.weight_update.report import SyncReport
from torchrl_moe.weight_update.rolling import RollingSwap, waits_for_update
from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme
from torchrl_moe.weight_update.sender import SenderTransport, VLLMWeightReceiver, VLLMWeightSender
from torchrl_moe.weight_update.source import Weights, named_tensors
from torchrl_moe.weight_update.transports.registry import MemmapTransport


class VLLMDoubleBufferSyncScheme(VLLMWeightSyncScheme):
    """A weight sync through a directory, with TorchRL's arguments.

    Args:
        remote_addr: the directory as the trainer sees it.
        local_addr: the same directory as the engines see it, if that differs.
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
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        super().__init__(strategy=strategy, folder=remote_addr, prefetch=num_threads)
        self.remote_addr, self.num_threads = os.fspath(remote_addr), num_threads
        self.local_addr = self.remote_addr if local_addr is None else os.fspath(local_addr)
        self.options = replace(self.options, store=replace(self.options.store, seen_as=Path(self.local_addr)))

    def create_sender(self) -> VLLMDoubleBufferWeightSender:
        """Return the trainer's side."""
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, vllm_engine: object) -> VLLMDoubleBufferWeightReceiver:
        """Return the engine's side, for a trainer that has no engine."""
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)

    def create_transport(self) -> VLLMDoubleBufferTransport:
        """Return the directory, to write weights to and read them from."""
        return VLLMDoubleBufferTransport(self.remote_addr, self.local_addr, self.num_threads)


class VLLMDoubleBufferTransport(SenderTransport):
    """TorchRL's transport over a directory of versions; arguments as of :class:`VLLMDoubleBufferSyncScheme`."""

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
    ) -> None:
        super().__init__(VLLMDoubleBufferSyncScheme(remote_addr, local_addr, num_threads))

    def check_connection(self) -> bool:
        """Whether what is sent can arrive: always, since it is written to a directory."""
        return True


class VLLMDoubleBufferWeightSender(VLLMWeightSender):
    """A sender that, like TorchRL's, may have no engine: it writes, and a receiver polls."""

    def update_weights(self, weights: Weights | None = None, *, progress: bool = True) -> SyncReport:
        """Write a version, and load it into the engine if there is one."""
        if self.has_engine:
            return super().update_weights(weights, progress=progress)
        self.publish(weights)
        return self.report_published()


class VLLMDoubleBufferWeightReceiver(VLLMWeightReceiver):
    """Loads versions from a directory into an engine, when it is polled or when a replica was restarted.

    Args:
        scheme: has the directory.
        vllm_engine: an ``AsyncVLLM``; anything else is a ``ValueError``.

    Attributes:
        report: of the last version that it loaded; ``None`` before.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: object) -> None:
        super().__init__(scheme, vllm_engine)
        options, folder = scheme.options, scheme.options.store.seen_as
        self._store = WeightStoreReader(folder)
        self._swap = RollingSwap(self._engine, MemmapTransport(folder), options.staging, options.swapping)
        self._lock = threading.Condition()
        self.report: SyncReport | None = None
        self._served: Published | None = None  # the last version that a replica took
        self._refused: int | None = None  # the last one that none could read
        if self._engine.weight_sync is None:  # a sender with the engine does this itself
            self._engine.register_weight_sync(self.bring)

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Update all replicas to the newest version, if it is newer than what one of them holds.

        Args:
            timeout: TorchRL's, not used: each step of a replica has 120 seconds.

        Returns:
            Whether there was one. :attr:`report` has the details.

        Raises:
            WeightSyncError: fewer than nine of ten replicas hold it; or the replicas hold a newer version than the
                directory, or another one of the same number, as after a trainer that began again in an empty directory.
        """
        del timeout
        with self._lock:
            newest = self._newest() or 0
            late = [e.index for e in self._engine.replica_table if waits_for_update(e) and e.version < newest]
            if not late:
                return False
            self.report = self._apply(newest, late)
            if len(self.report.failed) == len(late):
                self._swap.give_up()  # others may have claimed them; the next poll claims the free ones
            self.report = self._swap.check_serving(self.report, self._lock)
            return True

    def bring(self, index: int) -> None:
        """Bring a STARTING replica, such as a restarted one, to the newest version and to SERVING.

        If that is damaged, or not the engine's tensors, it gets the last one that a replica took.

        Raises:
            WeightSyncError: it does not hold the version, or others hold one and the directory has none any more, or
                began again, see :meth:`poll_and_apply`.
        """
        with self._lock:
            newest = self._newest()
            if newest is None:
                if self._engine.replica_table.latest_version:
                    raise WeightSyncError(f"{self._store.folder} has no version any more: send the weights again")
                self._swap.serves(index)  # nothing was sent yet: all have the checkpoint
                return
            # what no replica could read is not asked of this one too
            if newest == self._refused and self._served is not None:
                newest = self._served.version
            if failed := self._apply(newest, [index]).failed:
                raise WeightSyncError(f"replica {index} was not brought to version {newest}: {failed[index]}")

    def _apply(self, version: int, indices: Sequence[int]) -> SyncReport:
        began, before = time.perf_counter(), self._refused
        self._refused = version  # until one could read it
        published = Published(version=version, manifest=self._store.manifest(version), began=began)
        staged = self._swap.stage(published, indices)
        if not all(isinstance(one, WeightSyncError) for one in staged.values()):
            self._refused = before if before != version else None
        report = published.report(self._swap.swap(published, staged, indices))
        if len(report.failed) < len(report.replicas):
            self._served = published
        return report

    def _newest(self) -> int | None:
        """Return the directory's newest version; refuse one whose number says nothing about what replicas hold."""
        newest, held, served = self._store.newest(), self._engine.replica_table.latest_version, self._served
        if newest is None or newest > held:
            return newest
        is_other = False
        if served is not None and served.version == newest == held:
            is_other = self._store.manifest(newest).digest != served.digest
        if newest < held or is_other:
            raise WeightSyncError(
                f"the newest version in {self._store.folder} is {newest}{', with other weights' * is_other}, and the "
                f"replicas hold version {held}: the directory was emptied, or the engine had weights from elsewhere. "
                "Start the trainer in a directory that has its versions, so that numbers continue, or restart the "
                "engine"
            )
        return newest

    def apply_weights(self, weights: Mapping[str, Tensor] | None = None, inplace: bool = True) -> None:
        """Do the same as :meth:`poll_and_apply`; ``weights`` must be those of the version.

        Args:
            weights: what ``receive_weights()`` of the scheme's transport returned; compared with the directory.
            inplace: the engine's weights are replaced in place.

        Raises:
            ValueError: ``inplace`` is False.
            TypeError: ``weights`` are no mapping and no pairs.
            DigestMismatch, ManifestMismatch: the newest version of the directory holds other weights.
            WeightSyncError: as :meth:`poll_and_apply`.
        """
        if not inplace:
            raise ValueError("apply_weights(inplace=False): the engine's weights are replaced in place")
        if weights is not None:
            self._check_published(named_tensors(weights))
        self.poll_and_apply()

    def _check_published(self, weights: Mapping[str, Tensor]) -> None:
        """Raise an error unless the directory's newest version holds these bytes."""
        newest = self._store.newest()
        if newest is None:
            raise ManifestMismatch(f"apply_weights: nothing was written to {self._store.folder} yet")
        manifest = self._store.manifest(newest)
        if {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()} != manifest.tensors:
            raise ManifestMismatch(
                f"apply_weights: these are not the tensors of version {manifest.version} in the directory, which alone "
                "can be applied: pass nothing, or write them with sender.update_weights(weights) first"
            )
        for entry in manifest.entries:
            content = weights[entry.name].detach().cpu().contiguous().view(-1).view(torch.uint8)
            check_digest(manifest.version, entry, content.numpy().data)
