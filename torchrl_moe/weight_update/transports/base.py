"""The two sides of a transport, the sender's and a worker's, as protocols; and the data that they exchange.

Whatever the transport, a version is published to the host's weight store first: a late or restarted replica can load it
from there, and a collective transport sends the store's flat bytes as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from torchrl_moe.modules.backends.replica import Replica, ReplicaInfo, StageReport, SwapReport

if TYPE_CHECKING:  # processes that only pass a report on import neither torch nor the store
    from torch import Tensor, nn
    from vllm.config import ParallelConfig

    from torchrl_moe.store import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """How a replica prepares a version while it serves."""

    verify: Literal["digest", "canary", "off"] = "digest"
    threads: int = 1


class Transport(Protocol):
    """One way from the trainer to replicas. Its methods may be called for several replicas at the same time."""

    def open(self, replica: Replica, timeout: float) -> None:
        """Make a replica ready to take versions; once for each replica object, a restarted one included."""

    def stage(self, replica: Replica, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        """Bring a version to a replica while it serves; nothing of it is used yet."""

    def swapping(self, replica: Replica, manifest: Manifest, swap: Callable[[], SwapReport]) -> SwapReport:
        """Call ``swap``, which has a replica load what was staged, and send beside it what comes only then."""

    def close(self) -> None:
        """Release all replicas. Idempotent."""


class Receiver(Protocol):
    """Where a worker takes versions from; the code that loads them knows nothing else of a transport."""

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a version that is there."""

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Bring a version here, and compare its digests if asked to. May wait for the sender: it runs in a thread."""

    def reading(self, manifest: Manifest) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Yield a version's tensors by checkpoint name; they are valid inside the context only."""

    def close(self) -> None:
        """Disconnect from the sender. Idempotent."""


@runtime_checkable
class LoadingReceiver(Receiver, Protocol):
    """A receiver that keeps nothing: tensors go into the model as they arrive, in the pause."""

    def load_into(self, model: nn.Module, manifest: Manifest) -> None:
        """Receive a version into a model that vLLM has taken apart."""


def workers_of(info: ReplicaInfo) -> int:
    """Return how many workers a replica has: one for each tensor parallel, pipeline and data parallel rank."""
    return info.tensor_parallel_size * info.pipeline_parallel_size * info.data_parallel_size


def rank_of(parallel_config: ParallelConfig, rank_offset: int) -> int:
    """Return a worker's rank in the group of its replica and the trainer."""
    before: int = parallel_config.data_parallel_index * parallel_config.world_size
    return before + int(parallel_config.rank) + rank_offset
