"""The trainer's side of a weight sync: publish a version once, then bring every replica to it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from torchrl_moe._errors import WeightSyncError
from torchrl_moe.weight_update.adapter_publishing import AdapterPublisher
from torchrl_moe.weight_update.metadata import check_metadata
from torchrl_moe.weight_update.options import Scheme
from torchrl_moe.weight_update.publishing import Published, Publisher
from torchrl_moe.weight_update.report import SyncReport
from torchrl_moe.weight_update.rolling import SYNCABLE, RollingSwap, Staged, waits_for_update
from torchrl_moe.weight_update.source.layout import Weights
from torchrl_moe.weight_update.source.ranks import is_first
from torchrl_moe.weight_update.target import check_numbers, engine_of, tensors_of
from torchrl_moe.weight_update.transports.base import Transport
from torchrl_moe.weight_update.transports.registry import open_transport

__all__ = ["VLLMWeightSender"]


class VLLMWeightSender:
    """Sends a model's weights to the replicas of an engine; :meth:`create_sender` of a scheme makes it.

    Its methods may be called from any thread; they take turns.

    Versions go on from the highest that the engine or the store has. With a model of several ranks (FSDP2) each makes
    a sender, registers its part and calls :meth:`update_weights` or :meth:`publish`; rank 0 alone has the engine.

    Example of a life, in order::

        sender.register_model(model)
        sender.init_all_workers_group(None, vllm_engine=engine)
        report = sender.update_weights()      # publish, prefetch and apply in one; or each by itself
        sender.shutdown()
    """

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self.options = options = scheme.options
        self.version = 0
        with_canary = options.staging.verify == "canary"
        kind = AdapterPublisher if options.source.lora == "adapter" else Publisher
        self._publisher = kind(options.store, options.source, options.swapping.timeout_seconds, with_canary)
        self._swap: RollingSwap | None = None
        self._published: Published | None = None
        self._served: Published | None = None  # the last version that a replica has held
        self._failed: Published | None = None  # the last version, if replicas turned it down and none holds it
        self._pending: Future[Published] | None = None
        self._asked_at: dict[int, float] = {}  # replica -> when it was asked for the version, after publishing began
        self._collectors: list[weakref.ref[Any]] = []
        self._announced = 0  # the last version that collectors heard of
        self._lock = threading.RLock()
        self._closed = False

    # -- set-up -----------------------------------------------------------------------------------------------------

    def register_model(self, model: nn.Module) -> None:
        """Take the model whose weights are sent: a transformers model, with peft's adapters or not, or a wrapper."""
        with self._lock:
            self._publisher.register(model)

    def register_collector(self, collector: Any) -> None:
        """Take a collector whose policy version counts the updates (``increment_version``)."""
        if not callable(getattr(collector, "increment_version", None)):
            raise TypeError(f"a collector counts updates by increment_version(), got {type(collector).__name__}")
        self._collectors.append(weakref.ref(collector))

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimiser wait, before each step, for what ``publish(wait=False)`` is still copying."""

        def wait(*_: Any) -> None:
            self.wait_published()

        optimizer.register_step_pre_hook(wait)

    def init_all_workers_group(
        self, model_metadata: Mapping[str, Any] | None = None, vllm_engine: Any = None, *, takeover: bool = False
    ) -> None:
        """Open the transport in all replicas, whose weights are this driver's from now on. A replica that starts later,
        or again, is brought to the newest weights.

        Args:
            model_metadata: name -> (dtype, shape) of what will be sent; checked against the engine's, if given.
            vllm_engine: the engine; TorchRL's may be missing here, and then receives elsewhere.
            takeover: whether to take it from another driver that lives and updates it; that one's next update is
                refused. One that is gone, or shut its sender down, needs no takeover.

        Raises:
            WeightsOwnedError: another driver updates the engine; no replica was touched.
            ValueError: no engine, or one of other numbers than the scheme says.
            NoReplicaError: none of its replicas serves.
            ManifestMismatch: metadata, or the registered model, does not have the engine's tensors.
            EngineError: a replica does not say which tensors it has.
            WeightSyncError, EngineError: no replica took the transport; the error is the first one's.
                The next update reports a single one that could not.
        """
        check_numbers(engine_of(vllm_engine), self.options)
        with self._lock:
            self._check_open()
            self.wait_published()
            ready = [entry for entry in vllm_engine.replica_table if waits_for_update(entry)]
            expected = tensors_of(vllm_engine, ready, self.options.swapping.timeout_seconds)
            dtype = getattr(torch, vllm_engine.infos[0].dtype or "none", None)  # those that never came have no info
            self._publisher.check(expected)
            if self.options.source.lora != "adapter":  # which comes under names of its own
                check_metadata(model_metadata, expected, self._publisher.model)
            swap = RollingSwap(vllm_engine, self._open_transport(), self.options.staging, self.options.swapping)
            try:
                swap.open(ready, takeover)
            except BaseException:
                swap.transport.close()
                raise
            self._publisher.expect(expected, dtype)
            self._let_go(to_itself=self._swap is not None and self._swap.engine is vllm_engine)
            self._swap = swap
            self.version = max(self.version, vllm_engine.replica_table.latest_version)
            if self._published is not None and self._published.version != self.version:
                self._published = None  # the engine has had newer weights, of another sender
            vllm_engine.register_weight_sync(self.bring, self.update_weights)

    def _open_transport(self) -> Transport:
        options, store = self.options, self.options.store
        name = "adapter" if options.source.lora == "adapter" else options.transport
        return open_transport(name, store.folder, store.seen_as, **options.collective.where())

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sender was shut down: make a new scheme and sender")

    @property
    def has_engine(self) -> bool:
        """Whether :meth:`init_all_workers_group` was given an engine."""
        return self._swap is not None

    def _ready(self) -> RollingSwap:
        self._check_open()
        if self._swap is None:
            raise RuntimeError("no engine: call init_all_workers_group(None, vllm_engine=engine) first")
        if self._swap.engine.weight_sync != self.bring:
            raise WeightSyncError(
                "the engine takes its weights from another sender now, or from none: use that one, or call "
                "init_all_workers_group() again to have it back"
            )
        return self._swap

    # -- one update -------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights | None = None) -> SyncReport:
        """Bring all replicas to the model's weights as they are now.

        Args:
            weights: what to send instead of the registered model: another model, a TensorDict, or names and tensors;
                names of the checkpoint, or the registered model's own.

        Returns:
            The report; ``report.failed`` names replicas that do not hold the version. On ranks other than 0 it names
            no replica.

        Raises:
            WeightSyncError: fewer than ``min_serving`` replicas hold it; ``.report`` has the details.
            ManifestMismatch: the weights do not have the engine's tensors; no replica was touched.
        """
        with self._lock:
            if self._swap is None and not is_first():
                self.publish(weights)
                return self.report_published()
            version = self._publish(weights, self._ready)
            return self.apply(version, prefetched=self.prefetch(version))

    def rollback(self, version: int) -> SyncReport:
        """Bring all replicas to what an older version held, under a new number; the trainer's model stays as it is.

        Args:
            version: one of the last ``keep_versions``, which the store still has.

        Returns:
            As :meth:`update_weights`.

        Raises:
            ManifestMismatch: the store has it no longer; the message says which it has.
            WeightSyncError: fewer than ``min_serving`` replicas hold the new version.
        """
        with self._lock:
            if self._swap is not None or is_first():
                self._ready()
            number = self._note(self._publisher.republish(version, self._next_version))
            return self.report_published() if self._swap is None else self.apply(number)

    def publish(self, weights: Weights | None = None, *, wait: bool = True) -> int:
        """Write a new version to the store, and return its number. The engine is not touched.

        Args:
            weights: as in :meth:`update_weights`.
            wait: whether to return when it is written. Otherwise it is copied while the caller goes on, and must not be
                changed until :meth:`wait_published` has returned: call that before the optimiser's step, or
                :meth:`guard` the optimiser. An error comes from there.
        """
        with self._lock:
            if wait:
                return self._publish(weights, self._check_open)
            self._check_open()
            version = self._next_version()
            self._pending = self._publisher.publish_behind(weights, version)
            return version

    def _publish(self, weights: Weights | None, check: Callable[[], object]) -> int:
        """Write a version; what may fail on one rank only is left to where the others hear of it."""

        def number() -> int:
            check()
            return self._next_version()

        return self._note(self._publisher.publish(weights, number))

    def _next_version(self) -> int:
        self.wait_published()
        return max(self.version, self._publisher.newest()) + 1

    def wait_published(self) -> int:
        """Wait for what ``publish(wait=False)`` began, if anything; return the version published last."""
        with self._lock:
            pending, self._pending = self._pending, None
            return self.version if pending is None else self._note(pending.result())

    def _note(self, published: Published) -> int:
        self.version, self._published = published.version, published
        self._asked_at.clear()
        return published.version

    def prefetch(self, version: int, replicas: Sequence[int] | None = None) -> dict[int, Staged]:
        """Let replicas, all by default, prepare a version while they serve; return what each found."""
        with self._lock:
            swap, published = self._ready(), self._newest(version)
            asked_at = time.perf_counter() - published.began
            staged = swap.stage(published, replicas)
            self._asked_at |= dict.fromkeys(staged, asked_at)
            return staged

    def _newest(self, version: int) -> Published:
        if self._published is None or self._published.version != version:
            self.wait_published()
        published = self._published
        if published is None or published.version != version:
            last = "none" if published is None else published.version
            raise WeightSyncError(f"version {version} is not the one published last ({last}): update the weights")
        return published

    def apply(
        self,
        version: int,
        prefetched: Mapping[int, Staged] | None = None,
        *,
        replicas: Sequence[int] | None = None,
    ) -> SyncReport:
        """Swap the version published last into replicas, ``rolling`` at a time.

        Args:
            version: what :meth:`publish` returned.
            prefetched: what :meth:`prefetch` returned; asked for, if not given.
            replicas: indices of the only ones to bring; all by default. A replica that was late, or is STARTING after
                a restart, is brought by naming it here.

        Raises:
            WeightSyncError: a replica failed, and fewer than ``min_serving`` hold the version now.
        """
        with self._lock:
            swap, published = self._ready(), self._newest(version)
            staged = self.prefetch(version, replicas) if prefetched is None else prefetched
            report = self._apply(published, staged, list(staged) if replicas is None else replicas)
            swap.check_serving(report)
            self._announce(version)
            return report

    def _apply(self, published: Published, staged: Mapping[int, Staged], indices: Sequence[int]) -> SyncReport:
        swap = self._ready()
        outcomes = swap.swap(published, staged, indices)
        if any(outcome.error is None for outcome in outcomes):
            self._served = published
            self._publisher.protect(published.version)
            self._failed = None if published is self._published else self._failed
        elif any(outcome.rejected for outcome in outcomes) and self._served is not published:
            self._failed = published
        return published.report(tuple(outcome.asked(self._asked_at.get(outcome.replica, 0.0)) for outcome in outcomes))

    def report_published(self) -> SyncReport:
        """Return a report of the version published last."""
        return self._newest(self.version).report()

    def bring(self, index: int) -> None:
        """Bring a replica that is STARTING to the version published last, and to SERVING; what was restarted needs it.

        If no replica could hold that version, it gets the last one that some did, or keeps the checkpoint's weights.

        Raises:
            WeightSyncError: it does not hold the version.
        """
        with self._lock:
            swap = self._ready()
            if self._pending is not None and self._pending.exception() is None:  # its error is the trainer's to hear
                self.wait_published()
            good = self._published if self._failed is None else self._served
            if good is None:
                if swap.engine.replica_table.latest_version:
                    raise WeightSyncError("nothing was published since the engine got this sender: update the weights")
                swap.serves(index)  # no weights were ever taken: the checkpoint is what all have
                return
            entry = swap.engine.replica_table[index]
            if entry.state in SYNCABLE and entry.version == good.version:  # an update was there first
                return
            report = self._apply(good, swap.stage(good, [index]), [index])
            if report.failed:
                raise WeightSyncError(
                    f"replica {index} was not brought to version {good.version}: {report.failed[index]}"
                )
            self._announce(good.version)

    def _announce(self, version: int) -> None:
        if version == self._announced:  # a late replica: the others had it before
            return
        self._announced = version
        for collector in self._collectors:
            if (alive := collector()) is not None:
                alive.increment_version()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _let_go(self, to_itself: bool = False) -> None:
        if self._swap is not None:
            if self._swap.engine.weight_sync == self.bring:  # and not another sender's, which came later
                self._swap.engine.register_weight_sync(None)
                if not to_itself:
                    self._swap.give_up()
            self._swap.transport.close()
            self._swap = None

    def shutdown(self) -> None:
        """Let go of the replicas, and remove the weight store if it is the scheme's own. Idempotent."""
        with self._lock:
            if not self._closed and self._pending is not None:
                self._pending.exception()  # nobody is left to hear of it
            self._pending, self._closed = None, True
            self._let_go()
            self._publisher.close()
            self._scheme.shutdown()
