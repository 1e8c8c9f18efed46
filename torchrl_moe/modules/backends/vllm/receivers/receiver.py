"""What a worker knows of a transport: a protocol, and which name stands for which receiver."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from torchrl_moe.data.weight_store import Manifest

__all__ = ["Receiver", "open_receiver", "rank_of"]


class Receiver(Protocol):
    """Where a worker takes versions from. What loads them sees nothing else."""

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a version that is there.

        Raises:
            ManifestMismatch: it is not.
        """

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Bring a version here, and compare its digests if asked to. May wait for the sender: it runs in a thread.

        Raises:
            DigestMismatch: other bytes arrived than were published.
        """

    def reading(self, manifest: Manifest, *, verify: bool = False) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Give a version's tensors by checkpoint name; they are good inside the context only.

        Args:
            manifest: the version.
            verify: compare the digest of a tensor when it is taken, where :meth:`fetch` did not: then a
                ``DigestMismatch`` comes from there.
        """

    def close(self) -> None:
        """Let go of the sender. Idempotent."""


def rank_of(parallel_config: Any, rank_offset: int) -> int:
    """Return a worker's rank in the group of its replica and the trainer.

    Args:
        parallel_config: vLLM's, of this worker.
        rank_offset: the rank of the replica's first worker.
    """
    before: int = parallel_config.data_parallel_index * parallel_config.world_size
    return before + int(parallel_config.rank) + rank_offset


def open_receiver(transport: str, options: Mapping[str, Any], worker: Any = None) -> Receiver:
    """Open a transport by its name.

    Args:
        transport: the scheme's.
        options: what this transport needs to know, such as ``folder``.
        worker: the weight engine that asks; a collective transport takes its rank and device from it.

    Raises:
        ValueError: there is no such transport.
    """
    if transport == "memmap":
        from torchrl_moe.modules.backends.vllm.receivers.memmap import MemmapReceiver

        return MemmapReceiver(**options)
    if transport == "gloo":
        from torchrl_moe.modules.backends.vllm.receivers.gloo import GlooReceiver

        return GlooReceiver(options, rank_of(worker.parallel_config, options["rank_offset"]))
    if transport == "nccl":
        from torchrl_moe.modules.backends.vllm.receivers.nccl import NcclReceiver

        return NcclReceiver(options, rank_of(worker.parallel_config, options["rank_offset"]), worker)
    raise ValueError(f"unknown transport {transport!r}; the worker has 'memmap', 'gloo' and 'nccl'")
