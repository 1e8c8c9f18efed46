"""The trainer's side of a weight sync: publish a version once, then bring every replica to it, one after another.

A replica takes no new requests while its weights are swapped; the others go on serving. A failure before the swap
leaves it serving its old version; after it, the swap is tried once more, and a replica that fails twice is quarantined:
never resumed, never routed to, and its process ended, so that the requests frozen in it fail instead of waiting.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from torchrl_moe._errors import (
    EngineError,
    ManifestMismatch,
    NoReplicaError,
    ReplicaDiedError,
    TorchRLMoEError,
    WeightSyncError,
)
from torchrl_moe.data.weight_store import Manifest, WeightStoreWriter, check_tensors
from torchrl_moe.modules.backends.replica import PauseMode, StageReport, SwapReport
from torchrl_moe.modules.policies.unstack import checkpoint_tensors, model_metadata
from torchrl_moe.modules.serving.roster import RosterEntry
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.weight_update.metadata import trained_model
from torchrl_moe.weight_update.report import ReplicaSync, SyncReport
from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme
from torchrl_moe.weight_update.transports.transport import StageOptions

__all__ = ["WeightSender"]

ATTEMPTS = 2
SYNCABLE = frozenset({ReplicaState.SERVING, ReplicaState.DRAINING})
LATE = SYNCABLE | {ReplicaState.STARTING}  # what may be brought to a version by name

Staged = StageReport | TorchRLMoEError


class WeightSender:
    """Sends a model's weights to the replicas of an engine. Its methods may be called from any thread; they take turns.

    Versions go on from the highest that the engine holds.

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
        self._announced = 0  # the last version that collectors were told of
        self._opened: weakref.WeakSet[Any] = weakref.WeakSet()  # replicas that know the store
        self._lock = threading.RLock()
        self._closed = False

    # -- set-up -----------------------------------------------------------------------------------------------------

    def register_model(self, model: nn.Module) -> None:
        """Take the model whose weights are sent: a transformers model, or a wrapper around one."""
        self._model = trained_model(model)

    def register_collector(self, collector: Any) -> None:
        """Take a collector whose policy version counts the updates (``increment_version``)."""
        if not callable(getattr(collector, "increment_version", None)):
            raise TypeError(f"a collector counts updates by increment_version(), got {type(collector).__name__}")
        self._collectors.append(weakref.ref(collector))

    def init_all_workers_group(self, metadata: Mapping[str, Any] | None = None, vllm_engine: Any = None) -> None:
        """Open the transport in all replicas.

        Args:
            metadata: name -> (dtype, shape) of what will be sent; checked against the engine's, if given.
            vllm_engine: the engine.

        Raises:
            ValueError: no engine, or one of another number of replicas than the scheme says.
            NoReplicaError: none of its replicas serves.
            ManifestMismatch: metadata, or the registered model, does not have the engine's tensors.
        """
        if not isinstance(vllm_engine, GenerationService):
            raise ValueError(f"vllm_engine must be an AsyncVLLM, got {type(vllm_engine).__name__}")
        count = vllm_engine.num_replicas
        if self.scheme.num_replicas not in (None, count):
            raise ValueError(f"num_replicas={self.scheme.num_replicas}, but the engine has {count}")
        if (self.scheme.min_serving or 0) > count:
            raise ValueError(f"min_serving={self.scheme.min_serving}, but the engine has {count} replicas")
        with self._lock:
            self._check_open()
            ready = [entry for entry in vllm_engine.roster if entry.state in SYNCABLE]
            if not ready:
                raise NoReplicaError(f"no replica serves: {vllm_engine!r}")
            expected = ready[0].replica.call("metadata", self.scheme.timeout_seconds)
            self._check_names(metadata, expected)
            self._opened.clear()
            for entry in ready:
                self._open(entry)
            self._engine, self._expected = vllm_engine, expected
            self.version = max(self.version, *(entry.version for entry in vllm_engine.roster))

    def _check_names(self, metadata: Mapping[str, Any] | None, expected: Mapping[str, Any]) -> None:
        own: set[str] = set()
        if self._model is not None:
            check_tensors(model_metadata(self._model), expected)
            own = set(self._model.state_dict())
        if metadata is None or set(metadata) == own:
            return
        if set(metadata) == set(expected):
            check_tensors(metadata, expected)
            return
        if not own and any("experts" in name and name not in expected for name in metadata):
            return  # a model's stacked experts: fewer, larger tensors, which nobody here can un-stack yet
        raise ManifestMismatch(
            "metadata names neither the engine's checkpoint tensors nor the model's own: pass None, "
            "get_model_metadata(model) or engine.get_model_metadata()"
        )

    def _open(self, entry: RosterEntry) -> None:
        options = {"folder": str(self.scheme.folder)}
        entry.replica.call(
            "init_weights", self.scheme.timeout_seconds, transport=self.scheme.transport, options=options
        )
        self._opened.add(entry.replica)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sender was shut down: make a new scheme and sender")

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
        with self._lock:
            self._running_engine()
            version = self.publish(weights)
            return self.apply(version, prefetched=self.prefetch(version))

    def publish(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None) -> int:
        """Write a new version to the store, and return its number. The engine is not touched."""
        with self._lock:
            self._check_open()
            if weights is None:
                if self._model is None:
                    raise RuntimeError("publish: no model; call register_model(model) first, or pass weights")
                weights = checkpoint_tensors(self._model)
            items = list(weights.items() if isinstance(weights, Mapping) else weights)
            if self._expected is not None:
                check_tensors({name: (tensor.dtype, tensor.shape) for name, tensor in items}, self._expected)
            started = time.perf_counter()
            manifest = self._store.publish(items, self.version + 1)
            self.version, self._manifest = manifest.version, manifest
            self._published_seconds = time.perf_counter() - started
            return manifest.version

    def prefetch(self, version: int, replicas: Sequence[int] | None = None) -> dict[int, Staged]:
        """Let replicas, all by default, check a version while they serve; return what each found."""
        with self._lock:
            roster = self._running_engine().roster
            takes = SYNCABLE if replicas is None else LATE
            entries = list(roster) if replicas is None else [roster[index] for index in replicas]
            with ThreadPoolExecutor(max_workers=max(len(entries), 1)) as pool:
                found = pool.map(lambda entry: self._stage(entry, version, takes), entries)
                return {entry.index: staged for entry, staged in zip(entries, found, strict=True)}

    def _stage(self, entry: RosterEntry, version: int, takes: frozenset[ReplicaState]) -> Staged:
        if entry.state not in takes:
            return WeightSyncError(f"the replica is {entry.state.name}")
        try:
            if entry.replica not in self._opened:
                self._open(entry)
            staged: StageReport = entry.replica.call(
                "stage_weights", self.scheme.timeout_seconds, version=version, manifest=None, **asdict(StageOptions())
            )
        except TorchRLMoEError as error:
            return error
        except ValueError as error:  # so a ManifestMismatch arrives from another process
            return ManifestMismatch(str(error))
        return staged

    def apply(
        self,
        version: int,
        prefetched: Mapping[int, Staged] | None = None,
        *,
        replicas: Sequence[int] | None = None,
    ) -> SyncReport:
        """Swap the version published last into replicas, one after another.

        Args:
            version: what :meth:`publish` returned.
            prefetched: what :meth:`prefetch` returned; asked for, if not given.
            replicas: indices of the only ones to bring; all by default. A replica that was late, or is STARTING after
                a restart, is brought by naming it here.

        Raises:
            WeightSyncError: a replica failed, and fewer than ``min_serving`` hold the version now.
        """
        with self._lock:
            engine, manifest = self._running_engine(), self._manifest
            if manifest is None or manifest.version != version:
                raise WeightSyncError(f"version {version} is not the one published last ({self.version})")
            staged = self.prefetch(version, replicas) if prefetched is None else prefetched
            chosen = staged if replicas is None else replicas
            report = SyncReport(
                version=version,
                nbytes=manifest.nbytes,
                digest=manifest.digest,
                published=self._published_seconds,
                replicas=tuple(self._bring(index, manifest, staged[index]) for index in chosen),
            )
            self._check_serving(engine, report)
            self._announce(version)
            return report

    def _check_serving(self, engine: GenerationService, report: SyncReport) -> None:
        needed = self.scheme.min_serving
        needed = max(engine.num_replicas - 1, 1) if needed is None else needed
        holding = sum(entry.state in SYNCABLE and entry.version == report.version for entry in engine.roster)
        if report.failed and holding < needed:
            raise WeightSyncError(
                f"fewer than {needed} replicas hold version {report.version}: {report.failed}", report
            )

    def _announce(self, version: int) -> None:
        if version == self._announced:  # a late replica: the others had it before
            return
        self._announced = version
        for collector in self._collectors:
            if (alive := collector()) is not None:
                alive.increment_version()

    def _running_engine(self) -> GenerationService:
        self._check_open()
        if self._engine is None:
            raise RuntimeError("no engine: call init_all_workers_group(metadata, vllm_engine=engine) first")
        return self._engine

    # -- one replica ------------------------------------------------------------------------------------------------

    def _bring(self, index: int, manifest: Manifest, staged: Staged) -> ReplicaSync:
        """Bring one replica to a version, or say why it was not; until it is swapped, its old version goes on."""
        if isinstance(staged, TorchRLMoEError):
            return ReplicaSync(replica=index, error=str(staged))
        outcome = ReplicaSync(replica=index, fetched=staged.seconds)
        if staged.digest != manifest.digest:
            return replace(outcome, error="the replica found other bytes than were published: is the store shared?")
        roster = self._running_engine().roster
        before, started = roster[index].state, time.perf_counter()
        if before not in LATE:
            return replace(outcome, error=f"the replica is {before.name}")
        if self.scheme.mode == "drain" and before in SYNCABLE and not self._drain(index):
            self._move(index, before)
            return replace(outcome, error="requests did not finish in time to drain")
        if before in SYNCABLE and not self._move(index, ReplicaState.SYNCING):
            return replace(outcome, error="the replica is DEAD")
        outcome = replace(outcome, waited=time.perf_counter() - started)
        swap, attempts = self._swap(index, manifest.version)
        self._settle(index, manifest.version, before, swap)
        return replace(
            outcome, paused=swap.paused_seconds, loaded=swap.loading_seconds, attempts=attempts, error=swap.error
        )

    def _settle(self, index: int, version: int, before: ReplicaState, swap: SwapReport) -> None:
        """Put a replica back into service, or out of it for good."""
        roster = self._running_engine().roster
        if not swap.started:
            self._move(index, ReplicaState.SERVING)
            return
        if swap.error is not None:
            self._move(index, ReplicaState.QUARANTINED)
            roster[index].replica.shutdown()
            return
        with roster.changed:
            roster.set_version(index, version)
            if self._move(index, ReplicaState.SERVING) and before is ReplicaState.DRAINING:
                self._move(index, before)

    def _move(self, index: int, state: ReplicaState) -> bool:
        """Set a state, unless the replica died meanwhile, which anyone may have noted."""
        roster = self._running_engine().roster
        with roster.changed:
            if roster[index].state is ReplicaState.DEAD:
                return False
            if roster[index].state is not state:
                roster.set_state(index, state)
            return True

    def _drain(self, index: int) -> bool:
        roster = self._running_engine().roster
        entry = roster[index]
        self._move(index, ReplicaState.DRAINING)
        with roster.changed:
            return roster.changed.wait_for(
                lambda: entry.inflight == 0 or entry.state is ReplicaState.DEAD, self.scheme.timeout_seconds
            )

    def _swap(self, index: int, version: int) -> tuple[SwapReport, int]:
        """Swap, and once more if it failed; a replica that does not answer is not asked again."""
        roster = self._running_engine().roster
        pause: PauseMode = "keep"
        options = {"version": version, "pause": pause, "clear_cache": self.scheme.kv == "recompute", "canary": None}
        report = SwapReport(error="not tried")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                report = roster[index].replica.call("swap_weights", self.scheme.timeout_seconds, **options)
            except ReplicaDiedError as error:
                roster.mark_dead(index)
                return SwapReport(error=str(error)), attempt
            except (EngineError, ValueError) as error:
                return SwapReport(error=str(error)), attempt
            if report.error is None or not report.started:
                return report, attempt
        return report, ATTEMPTS

    def shutdown(self) -> None:
        """Remove the weight store. Idempotent."""
        with self._lock:
            self._closed = True
            self.scheme.shutdown()
