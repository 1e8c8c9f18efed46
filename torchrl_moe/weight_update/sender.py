"""The trainer's side of a weight sync: publish a version once, then bring every replica to it, one after another.

A replica takes no new requests while its weights are swapped; the others go on serving. A failure before the swap
leaves it serving its old version; after it, the swap is tried once more, and a replica that fails twice is quarantined,
never resumed and never routed to.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from torchrl_moe._errors import EngineError, TorchRLMoEError, WeightSyncError
from torchrl_moe.data.weight_store import Manifest, WeightStoreWriter, check_tensors
from torchrl_moe.modules.backends.replica import PauseMode, StageReport, SwapReport
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.weight_update.metadata import trained_model
from torchrl_moe.weight_update.report import ReplicaSync, SyncReport
from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme

__all__ = ["WeightSender"]

ATTEMPTS = 2
SYNCABLE = {ReplicaState.SERVING, ReplicaState.DRAINING}


class WeightSender:
    """Sends a model's weights to the replicas of an engine.

    Example of a life, in order::

        sender.register_model(model)
        sender.init_all_workers_group(None, vllm_engine=engine)
        report = sender.update_weights()      # publish, prefetch and apply in one; or each by itself
        sender.shutdown()
    """

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        self.scheme = scheme
        self.version = 0
        self._store = WeightStoreWriter(scheme.folder, scheme.timeout_seconds)
        self._model: nn.Module | None = None
        self._engine: GenerationService | None = None
        self._expected: Mapping[str, Any] | None = None
        self._manifest: Manifest | None = None
        self._published_seconds = 0.0
        self._collectors: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()

    # -- set-up -----------------------------------------------------------------------------------------------------

    def register_model(self, model: nn.Module) -> None:
        """Take the model whose weights are sent: a transformers model, or a wrapper around one."""
        self._model = trained_model(model)

    def register_collector(self, collector: Any) -> None:
        """Take a collector whose policy version counts the updates (``increment_version``)."""
        self._collectors.append(weakref.ref(collector))

    def init_all_workers_group(self, metadata: Mapping[str, Any] | None = None, vllm_engine: Any = None) -> None:
        """Open the transport in all replicas.

        Args:
            metadata: name -> (dtype, shape) of what will be sent; checked against the engine's, if given.
            vllm_engine: the engine.

        Raises:
            ValueError: no engine, or one of another number of replicas than the scheme says.
            ManifestMismatch: metadata, or the registered model, does not have the engine's tensors.
        """
        if not isinstance(vllm_engine, GenerationService):
            raise ValueError(f"vllm_engine must be an AsyncVLLM, got {type(vllm_engine).__name__}")
        if self.scheme.num_replicas not in (None, vllm_engine.num_replicas):
            raise ValueError(f"num_replicas={self.scheme.num_replicas}, but the engine has {vllm_engine.num_replicas}")
        self._engine = vllm_engine
        self._expected = vllm_engine.call_all("metadata", self.scheme.timeout_seconds)[0]
        if metadata is not None and not _same_names(metadata, self._expected):
            raise WeightSyncError(
                "metadata names neither the engine's checkpoint tensors nor the model's own: pass None, "
                "get_model_metadata(model) or engine.get_model_metadata()"
            )
        vllm_engine.call_all(
            "init_weights",
            self.scheme.timeout_seconds,
            transport=self.scheme.transport,
            folder=str(self.scheme.folder),
        )

    # -- one update -------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None) -> SyncReport:
        """Bring all replicas to the model's weights as they are now.

        Args:
            weights: checkpoint names and tensors to send, instead of the registered model's.

        Returns:
            The report; ``report.failed`` names replicas that do not hold the version.

        Raises:
            WeightSyncError: fewer than ``min_serving`` replicas hold it; ``.report`` has the details.
            ManifestMismatch: the weights do not have the engine's tensors; no replica was touched.
        """
        version = self.publish(weights)
        return self.apply(version, prefetched=self.prefetch(version))

    def publish(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None) -> int:
        """Write a new version to the store, and return its number. The engine is not touched."""
        if weights is None:
            if self._model is None:
                raise RuntimeError("publish: no model; call register_model(model) first, or pass weights")
            weights = checkpoint_tensors(self._model)
        items = list(weights.items() if isinstance(weights, Mapping) else weights)
        if self._expected is not None:
            check_tensors({name: (tensor.dtype, tensor.shape) for name, tensor in items}, self._expected)
        with self._lock:
            started = time.perf_counter()
            manifest = self._store.publish(items, self.version + 1)
            self.version, self._manifest = manifest.version, manifest
            self._published_seconds = time.perf_counter() - started
        return manifest.version

    def prefetch(self, version: int) -> dict[int, StageReport | TorchRLMoEError]:
        """Let every replica check a version while it serves; return what each found."""
        found: dict[int, StageReport | TorchRLMoEError] = {}
        for entry in self._running_engine().roster:
            try:
                found[entry.index] = entry.replica.call("stage_weights", self.scheme.timeout_seconds, version=version)
            except TorchRLMoEError as error:
                found[entry.index] = error
        return found

    def apply(self, version: int, prefetched: Mapping[int, StageReport | TorchRLMoEError] | None = None) -> SyncReport:
        """Swap a published version into every replica, one after another."""
        engine = self._running_engine()
        if self._manifest is None or self._manifest.version != version:
            raise WeightSyncError(f"version {version} is not the one published last ({self.version})")
        staged = self.prefetch(version) if prefetched is None else prefetched
        with self._lock:
            replicas = tuple(self._bring(entry.index, version, staged[entry.index]) for entry in engine.roster)
        report = SyncReport(
            version=version,
            nbytes=self._manifest.nbytes,
            digest=self._manifest.digest,
            published=self._published_seconds,
            replicas=replicas,
        )
        needed = self.scheme.min_serving
        needed = max(engine.num_replicas - 1, 1) if needed is None else needed
        if len(replicas) - len(report.failed) < needed:
            raise WeightSyncError(f"fewer than {needed} replicas hold version {version}: {report.failed}", report)
        for collector in self._collectors:
            if (alive := collector()) is not None:
                alive.increment_version()
        return report

    def _running_engine(self) -> GenerationService:
        if self._engine is None:
            raise RuntimeError("no engine: call init_all_workers_group(metadata, vllm_engine=engine) first")
        return self._engine

    # -- one replica ------------------------------------------------------------------------------------------------

    def _bring(self, index: int, version: int, staged: StageReport | TorchRLMoEError) -> ReplicaSync:
        if isinstance(staged, TorchRLMoEError):  # it was not touched: its old version goes on serving
            return ReplicaSync(replica=index, error=str(staged))
        roster = self._running_engine().roster
        state = roster[index].state
        if state not in SYNCABLE:
            return ReplicaSync(replica=index, fetched=staged.seconds, error=f"the replica is {state.name}")
        started = time.perf_counter()
        if self.scheme.mode == "drain" and not self._drain(index):
            roster.set_state(index, ReplicaState.SERVING)
            return ReplicaSync(replica=index, fetched=staged.seconds, error="requests did not finish in time to drain")
        waited = time.perf_counter() - started
        roster.set_state(index, ReplicaState.SYNCING)
        swap, attempts = self._swap(index, version)
        if swap.error is None:
            roster.set_version(index, version)
        roster.set_state(index, ReplicaState.SERVING if swap.error is None else ReplicaState.QUARANTINED)
        return ReplicaSync(
            replica=index,
            waited=waited,
            fetched=staged.seconds,
            paused=swap.paused_seconds,
            loaded=swap.loading_seconds,
            attempts=attempts,
            error=swap.error,
        )

    def _drain(self, index: int) -> bool:
        roster = self._running_engine().roster
        if roster[index].state is ReplicaState.SERVING:
            roster.set_state(index, ReplicaState.DRAINING)
        with roster.changed:
            return roster.changed.wait_for(lambda: roster[index].inflight == 0, self.scheme.timeout_seconds)

    def _swap(self, index: int, version: int) -> tuple[SwapReport, int]:
        """Swap, and once more if it failed; a replica that does not answer is not asked again."""
        replica = self._running_engine().roster[index].replica
        pause: PauseMode = "keep"
        options = {"version": version, "pause": pause, "clear_cache": self.scheme.kv == "recompute"}
        report = SwapReport(error="not tried")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                report = replica.call("swap_weights", self.scheme.timeout_seconds, **options)
            except EngineError as error:
                return SwapReport(error=str(error)), attempt
            if report.error is None:
                return report, attempt
        return report, ATTEMPTS

    def shutdown(self) -> None:
        """Remove the weight store. Idempotent."""
        self.scheme.shutdown()


def _same_names(metadata: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether metadata is the engine's, or that of a model with stacked experts (fewer, larger tensors)."""
    return set(metadata) == set(expected) or any("experts" in name and name not in expected for name in metadata)
