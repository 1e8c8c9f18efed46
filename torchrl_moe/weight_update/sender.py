"""The two sides of a weight sync under TorchRL's names: the sender updates every replica, the receiver observes."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol, SupportsIndex

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchrl_moe.errors import NoReplicaError, ReplicaDiedError, WeightSyncError
from torchrl_moe.modules.backends.checkpoint import checkpoint_kinds
from torchrl_moe.modules.serving.replica_table import TableEntry
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.store import WeightStoreReader
from torchrl_moe.weight_update.options import SyncOptions
from torchrl_moe.weight_update.publishing import AdapterPublisher, Published, Publisher
from torchrl_moe.weight_update.report import SyncReport
from torchrl_moe.weight_update.rolling import SYNCABLE, RollingSwap, Staged, waits_for_update
from torchrl_moe.weight_update.source import Kinds, Weights, check_metadata, is_first
from torchrl_moe.weight_update.transports.base import Transport, workers_of
from torchrl_moe.weight_update.transports.registry import open_transport


def engine_of(vllm_engine: object) -> GenerationService:
    """Return an engine whose weights can be updated."""
    if not isinstance(vllm_engine, GenerationService):
        raise ValueError(
            f"vllm_engine must be an AsyncVLLM, got {type(vllm_engine).__name__}: pass what "
            "torchrl_moe.modules.AsyncVLLM.from_pretrained() or make_async_vllm_engine() returned"
        )
    return vllm_engine


def check_numbers(engine: GenerationService, options: SyncOptions) -> None:
    count, wanted = engine.num_replicas, options.collective.gpus_per_replica
    if options.num_replicas not in (None, count):
        raise ValueError(f"num_replicas={options.num_replicas}, but the engine has {count}")
    if options.swapping.must_hold(count) > count:
        raise ValueError(f"min_serving={options.swapping.min_serving}, but the engine has {count} replicas")
    size = workers_of(engine.infos[0]) if engine.infos else 1
    if wanted not in (None, size):
        raise ValueError(f"gpus_per_replica={wanted}, but each replica of the engine has {size} workers")


def tensors_of(engine: GenerationService, entries: Iterable[TableEntry], seconds: float) -> Kinds:
    """Ask the first living replica for its tensors."""
    for entry in entries:
        # all have the same model; one that dies is passed over
        with contextlib.suppress(ReplicaDiedError):
            kinds: Kinds = checkpoint_kinds(entry.replica, seconds)
            return kinds
    raise NoReplicaError(f"no replica serves: {engine!r}")


class Scheme(Protocol):
    """What sender, receiver and transport use of the scheme that made them."""

    options: SyncOptions

    def create_sender(self) -> VLLMWeightSender: ...
    def shutdown(self) -> None: ...


class CountsUpdates(Protocol):
    """A collector, as far as it is notified of updates."""

    def increment_version(self) -> object: ...


class VLLMWeightSender:
    """Sends a model's weights to an engine's replicas; :meth:`create_sender` of a scheme makes it.

    Thread-safe: its methods run one at a time. Version numbers continue from the highest that the engine or the store
    has. With a model on several ranks (FSDP2) each rank makes a sender, registers its part and calls
    :meth:`update_weights` or :meth:`publish`; only rank 0 has the engine. The calls in order::

        sender.register_model(model)
        sender.init_all_workers_group(None, vllm_engine=engine)
        report = sender.update_weights()      # publish, prefetch and apply in one; or call each
        sender.shutdown()
    """

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self.options = options = scheme.options
        self.version = 0
        self._process = os.getpid()
        kind = AdapterPublisher if options.source.lora == "adapter" else Publisher
        self._publisher = kind(options.store, options.source, options.staging.verify == "canary")
        self._swap: RollingSwap | None = None
        self._published: Published | None = None
        self._served: Published | None = None  # the last version that a replica has held
        self._good: Published | None = None  # applied last, or if replicas refused that and none holds it, served
        self._pending: Future[Published] | None = None
        self._asked_at: dict[int, float] = {}  # replica -> when it was asked to fetch, after the start of publishing
        self._collectors: list[weakref.ref[CountsUpdates]] = []
        self._announced = 0  # the last version that collectors were notified of
        self._lock = threading.Condition(threading.RLock())
        self._closed = False

    def register_model(self, model: nn.Module) -> None:
        """Register the model whose weights are sent: a transformers model, with or without an adapter, or a wrapper."""
        with self._lock:
            self._check_open()
            self._publisher.register(model)

    def register_collector(self, collector: CountsUpdates) -> None:
        """Register a collector to be notified of updates (``increment_version``)."""
        if not callable(getattr(collector, "increment_version", None)):
            raise TypeError(f"a collector counts updates by increment_version(), got {type(collector).__name__}")
        self._collectors.append(weakref.ref(collector))

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimiser wait, before each step, for the copy of ``publish(wait=False)``.

        Raises:
            TypeError: it is none.
        """
        if not callable(getattr(optimizer, "register_step_pre_hook", None)):
            raise TypeError(f"guard: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")

        def wait(*_: object) -> None:
            self.wait_published()

        optimizer.register_step_pre_hook(wait)

    def init_all_workers_group(
        self, model_metadata: Kinds | None = None, vllm_engine: object = None, *, takeover: bool = False
    ) -> None:
        """Claim the weights of all replicas for this driver, and open their transport.

        A replica that starts or restarts later is updated to the newest weights.

        Args:
            model_metadata: name -> (dtype, shape) of what will be sent; checked against the engine's, if given.
            vllm_engine: the engine. ``None``, which TorchRL's signature allows, is a ``ValueError``; a double-buffer
                sender without an engine does not call this.
            takeover: whether to take the engine from a driver that is alive and updates it; that driver's next update
                is refused. A driver that ended, or shut its sender down, needs no takeover.

        Raises:
            WeightsOwnedError: another driver updates the engine; no replica was touched.
            ValueError: no engine, or one whose numbers differ from the scheme's.
            NoReplicaError: none of its replicas serves.
            ManifestMismatch: metadata, or the registered model, does not have the engine's tensors.
            WeightSyncError, EngineError: a replica does not report its tensors, or none opened the transport; if only
                some failed to, the next update reports them.
        """
        engine = engine_of(vllm_engine)
        check_numbers(engine, self.options)
        with self._lock:
            self._check_open()
            self.wait_published()
            # what serves, or waits for an update; the supervisor brings the others
            ready = [entry for entry in engine.replica_table if waits_for_update(entry)]
            # the engine's own names and shapes: what is sent is checked against them before any replica loads
            expected = tensors_of(engine, ready, self.options.swapping.timeout_seconds)
            dtype = getattr(torch, engine.infos[0].dtype or "none", None)  # None: never started
            self._publisher.check(expected)
            if self.options.source.lora != "adapter":  # an adapter has names of its own
                check_metadata(model_metadata, expected, self._publisher.model)
            # only now is anything claimed
            swap = RollingSwap(engine, self._open_transport(), self.options.staging, self.options.swapping)
            try:
                swap.open(ready, takeover)
            except BaseException:
                swap.transport.close()
                raise
            # nothing can fail any more: the former engine is released, and this one takes its place
            self._publisher.expect(expected, dtype)
            had_it = self._swap is not None and self._swap.engine is engine
            self._release_engine(to_itself=had_it)
            self._swap = swap
            # numbers only rise, also after those of another driver
            latest = engine.replica_table.latest_version
            self.version = max(self.version, latest)
            own = self._served.version if had_it and self._served is not None else 0
            # else another sender applied that, perhaps under the number of a version of this one
            if not had_it or latest != own:
                self._served = self._good = None
                if self._published is not None and self._published.version <= latest:
                    self._published = None
            # from here on restarted replicas get their weights from this sender
            engine.register_weight_sync(self.bring, self.update_weights)

    def _open_transport(self) -> Transport:
        options, store, group = self.options, self.options.store, self.options.collective
        name = "adapter" if options.source.lora == "adapter" else options.transport
        of_nccl: dict[str, object] = {}
        if name == "nccl":
            of_nccl = {"address": group.master_address, "port": group.master_port, "num_buffers": group.num_buffers}
        return open_transport(name, store.folder, store.seen_as, group.torch_device, group.buffer_bytes, **of_nccl)

    @property
    def has_engine(self) -> bool:
        """Whether :meth:`init_all_workers_group` was given an engine."""
        return self._swap is not None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sender was shut down: make a new scheme and sender")

    def _ready(self) -> RollingSwap:
        self._check_open()
        if self._swap is None:
            raise RuntimeError("no engine: call init_all_workers_group(None, vllm_engine=engine) first")
        if self._swap.engine.weight_sync != self.bring:
            raise WeightSyncError(
                "the engine takes its weights from another sender now, or from none: use that one, or call "
                "init_all_workers_group() again to take it back"
            )
        return self._swap

    def update_weights(self, weights: Weights | None = None, *, progress: bool = True) -> SyncReport:
        """Update all replicas to the model's current weights.

        Args:
            weights: what to send instead of the registered model: another model, a TensorDict, or names and tensors;
                names of the checkpoint, or the registered model's own.
            progress: whether a terminal shows a bar, with bytes and replicas, if it takes more than two seconds.

        Returns:
            The report; ``report.failed`` names replicas that do not hold the version. On ranks other than 0 it names
            no replica.

        Raises:
            WeightSyncError: fewer than ``min_serving`` replicas hold it; ``.report`` has the details. Or nothing was
                sent, as the weights are not finite, the store has no room, or another sender owns the engine; then
                ``.report`` is ``None``.
            ManifestMismatch: the weights do not have the engine's tensors; no replica was touched.
        """
        with self._lock:
            # ranks without the engine give their part of each tensor, and have nothing to apply
            if self._swap is None and not is_first():
                self.publish(weights)
                return self.report_published()
            # write, let replicas fetch and check while they serve, swap
            version = self._publish(weights, self._ready)
            return self._applied(version, self.prefetch(version), None, progress)

    def rollback(self, version: int) -> SyncReport:
        """Update all replicas to an older version's weights, under a new number; the trainer's model does not change.

        Args:
            version: one of the last ``keep_versions``, which the store still has.

        Returns:
            As :meth:`update_weights`.

        Raises:
            TypeError: it is no whole number.
            ManifestMismatch: the store has it no longer; the message says which it has.
            WeightSyncError: fewer than ``min_serving`` replicas hold the new version.
        """
        with self._lock:
            if self._swap is not None or is_first():
                self._ready()
            version = _number("rollback", version)
            # the bytes are there; only the number is new
            number = self._note(self._publisher.republish(version, self._next_version))
            return self.report_published() if self._swap is None else self.apply(number)

    def publish(self, weights: Weights | None = None, *, wait: bool = True) -> int:
        """Write a new version to the store, and return its number. The engine is not touched.

        Args:
            weights: as in :meth:`update_weights`.
            wait: whether to return when it is written. Otherwise the weights are copied while the caller continues, and
                must not change until :meth:`wait_published` has returned: call that before the optimiser's step, or
                :meth:`guard` the optimiser. Errors are raised there.

        Raises:
            RuntimeError: no weights were given, and no model is registered.
            ValueError: ``wait=False`` with weights that ranks hold in parts.
            WeightSyncError: as of :meth:`update_weights`.
        """
        with self._lock:
            if wait:
                return self._publish(weights, self._check_open)
            self._check_open()
            version = self._next_version()
            # read while the next forward runs; the optimiser's step must wait for it
            self._pending = self._publisher.publish_behind(weights, version)
            return version

    def _publish(self, weights: Weights | None, check: Callable[[], object]) -> int:
        """Write a version; errors of a single rank are raised inside ``write``, where they reach the other ranks."""

        def number() -> int:
            check()
            return self._next_version()

        return self._note(self._publisher.publish(weights, number))

    def _next_version(self) -> int:
        self.wait_published()
        return max(self.version, self._publisher.newest()) + 1

    def wait_published(self) -> int:
        """Wait for a running ``publish(wait=False)``, if any; return the version published last."""
        with self._lock:
            pending, self._pending = self._pending, None
            return self.version if pending is None else self._note(pending.result())

    def _note(self, published: Published) -> int:
        self.version, self._published = published.version, published
        self._asked_at.clear()
        return published.version

    def prefetch(self, version: int, replicas: Sequence[int] | None = None) -> dict[int, Staged]:
        """Let replicas, by default all, prepare a version while they serve; return their reports or errors."""
        with self._lock:
            swap, published = self._ready(), self._newest(_number("prefetch", version))
            # for the report: when the fetch began, as seconds after the start of publishing
            asked_at = time.perf_counter() - published.began
            staged = self._stage(swap, published, replicas)
            self._asked_at |= dict.fromkeys(staged, asked_at)
            return staged

    def _stage(self, swap: RollingSwap, published: Published, replicas: Sequence[int] | None) -> dict[int, Staged]:
        staged = swap.stage(published, replicas)
        # the next version is a whole one if a replica could not read this one
        if any(isinstance(one, WeightSyncError) for one in staged.values()):
            self._publisher.doubt()
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
            prefetched: what :meth:`prefetch` returned; by default it is called.
            replicas: indices of the replicas to update; default: all. Name a replica here that was late, or is STARTING
                after a restart.

        Raises:
            WeightSyncError: a replica failed, and fewer than ``min_serving`` hold the version now. One that died is
                waited for, within the limits of the engine's fault policy: it is restarted, and loads the version.
        """
        with self._lock:
            self._ready()
            self._newest(_number("apply", version))
            staged = self.prefetch(version, replicas) if prefetched is None else prefetched
            return self._applied(version, staged, replicas)

    def _applied(
        self, version: int, staged: Mapping[int, Staged], replicas: Sequence[int] | None, progress: bool = True
    ) -> SyncReport:
        swap, published = self._ready(), self._newest(version)
        report = self._apply(published, staged, list(staged) if replicas is None else replicas, progress)
        report = swap.check_serving(report, self._lock)
        self._announce(version)
        return report

    def _apply(
        self, published: Published, staged: Mapping[int, Staged], indices: Sequence[int], progress: bool = False
    ) -> SyncReport:
        swap, self._good = self._ready(), published
        outcomes = swap.swap(published, staged, indices, progress)
        if any(outcome.error is None for outcome in outcomes):
            self._served = published
            self._publisher.protect(published.version)
        elif any(outcome.rejected for outcome in outcomes):
            self._good = self._served
        return published.report(replace(one, asked_at=self._asked_at.get(one.replica, 0.0)) for one in outcomes)

    def report_published(self) -> SyncReport:
        """Return a report of the version published last."""
        return self._newest(self.version).report()

    def bring(self, index: int) -> None:
        """Bring a STARTING replica, such as a restarted one, to the version applied last and to SERVING.

        If no replica could hold that version, it gets the last one that some did, or keeps the checkpoint's weights.

        Raises:
            WeightSyncError: it does not hold the version.
        """
        with self._lock:
            swap = self._ready()
            good = self._good
            if good is None:
                if swap.engine.replica_table.latest_version:
                    raise WeightSyncError("nothing was applied since the engine got this sender: update the weights")
                swap.serves(index)  # no weights were ever loaded: all have the checkpoint
                return
            entry = swap.engine.replica_table[index]
            if entry.state in SYNCABLE and entry.version == good.version:  # an update came first
                return
            report = self._apply(good, self._stage(swap, good, [index]), [index])
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

    def _release_engine(self, to_itself: bool = False) -> None:
        if self._swap is not None:
            if self._swap.engine.weight_sync == self.bring:  # and not another sender's, which came later
                self._swap.engine.register_weight_sync(None)
                if not to_itself:
                    self._swap.give_up()
            self._swap.transport.close()
            self._swap = None

    def shutdown(self) -> None:
        """Release the replicas, and remove the weight store if the scheme made it. Idempotent.

        Without effect in a process that was forked from the trainer's.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closed and self._pending is not None:
                self._pending.exception()  # read it, since nothing else will
            self._pending, self._closed = None, True
            self._release_engine()
            self._publisher.close()
            self._scheme.shutdown()


def _number(call: str, version: object) -> int:
    if isinstance(version, bool) or not isinstance(version, SupportsIndex):
        raise TypeError(f"{call}: version must be an int, as publish() returns it, got {version!r}")
    return operator.index(version)


class VLLMWeightReceiver:
    """Observes what a sender loads into an engine; :meth:`create_receiver` of a scheme makes it.

    In TorchRL both sides join a process group. Here the sender updates the replicas, with or without a receiver.

    Args:
        scheme: the sender's, or one like it.
        vllm_engine: an ``AsyncVLLM``, or a handle of one.

    Raises:
        ValueError: it is not an ``AsyncVLLM``.

    Attributes:
        version: of the engine's weights at the last poll.
    """

    def __init__(self, scheme: Scheme, vllm_engine: object) -> None:
        self._scheme = scheme
        self._engine: GenerationService = engine_of(vllm_engine)
        self.version: int = self._engine.replica_table.latest_version

    def init_all_workers_group(self, model_metadata: Kinds | None = None) -> None:
        """Compare the trainer's tensors with the engine's. There is no group to join, and nothing is waited for.

        Args:
            model_metadata: name -> (dtype, shape), as the trainer's ``get_model_metadata(model)`` returns it.

        Raises:
            ValueError: the engine has other numbers of replicas or workers than the scheme.
            ManifestMismatch: it has other tensors.
            NoReplicaError: none of its replicas serves.
            EngineError: no replica reports its tensors.
        """
        options = self._scheme.options
        check_numbers(self._engine, options)
        if model_metadata is not None and options.source.lora != "adapter":  # an adapter has names of its own
            ready = filter(waits_for_update, self._engine.replica_table)
            check_metadata(model_metadata, tensors_of(self._engine, ready, options.swapping.timeout_seconds))

    def apply_weights(self, weights: Mapping[str, Tensor] | None = None, inplace: bool = True) -> None:
        """Do nothing, as TorchRL's receiver: when the sender's ``update_weights`` returns, replicas have the weights.

        Args:
            weights: refused.
            inplace: must be True: the engine's weights are replaced in place.

        Raises:
            ValueError: weights were given, which would not be applied, or ``inplace`` is False.
        """
        if weights is not None or not inplace:
            raise ValueError(
                "apply_weights: this receiver applies no weights: the sender brings them to the engine, inplace=True. "
                "Call sender.update_weights(weights)"
            )

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Return whether the engine has newer weights than at the last poll.

        Args:
            timeout: TorchRL's; nothing is waited for.
        """
        del timeout
        before, self.version = self.version, self._engine.replica_table.latest_version
        return self.version > before


class SenderTransport:
    """TorchRL's transport methods: sends with a sender of its own, made on first use, and reads from the weight store.

    Args:
        scheme: the options.
        vllm_engine: passed to the sender by :meth:`init_all_workers_group`; may be set later.
    """

    def __init__(self, scheme: Scheme, vllm_engine: object = None) -> None:
        self._scheme, self.vllm_engine = scheme, vllm_engine
        self._sender: VLLMWeightSender | None = None
        self._store = WeightStoreReader(scheme.options.store.seen_as)

    def _sending(self) -> VLLMWeightSender:
        if self._sender is None:
            self._sender = self._scheme.create_sender()
        return self._sender

    def init_all_workers_group(self, model_metadata: Kinds | None = None, gpus_per_replica: int | None = None) -> None:
        """Prepare the engine's replicas, as the sender's method of this name does.

        Args:
            model_metadata: as there.
            gpus_per_replica: TorchRL's; the scheme's is compared with the engine.

        Raises:
            ValueError: :attr:`vllm_engine` is not an ``AsyncVLLM``, or ``gpus_per_replica`` is not the scheme's.
        """
        if gpus_per_replica not in (None, self._scheme.options.collective.gpus_per_replica):
            raise ValueError(f"gpus_per_replica={gpus_per_replica}: give it to the scheme")
        self._sending().init_all_workers_group(model_metadata, self.vllm_engine)

    def send_weights(self, model_id: str, weights: Weights) -> None:
        """Send as the sender's ``update_weights`` does.

        Args:
            model_id: TorchRL's, which only names the model in a log there.
            weights: a model, or names and tensors.

        Raises:
            RuntimeError: the scheme needs an engine, and there is none yet.
            WeightSyncError: too few replicas hold the version.
        """
        del model_id
        self._sending().update_weights(weights)

    def receive_weights(
        self, timeout: float | None = None, *, weights: object = None, model: object = None, strategy: object = None
    ) -> TensorDict | None:
        """Return a copy of the newest version in the weight store, flat, or ``None`` if there is none.

        Args:
            timeout: TorchRL's; nothing is waited for.
            weights: refused.
            model: refused.
            strategy: refused.

        Raises:
            ValueError: ``weights``, ``model`` or ``strategy`` was given.
            ManifestMismatch: the version was replaced meanwhile by newer ones.
        """
        del timeout
        given = {"weights": weights, "model": model, "strategy": strategy}
        if named := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{', '.join(named)}: weights are returned, not loaded: load them yourself")
        version = self._store.newest()
        if version is None:
            return None
        with self._store.reading(self._store.manifest(version), verify=True) as found:
            return TensorDict({name: tensor.clone() for name, tensor in found.items()})

    def check_connection(self) -> bool:
        """Whether what is sent can arrive: the sender has an engine."""
        return self._sender is not None and self._sender.has_engine

    def shutdown(self) -> None:
        """Shut the sender down. Idempotent."""
        if self._sender is not None:
            self._sender.shutdown()
        self._store.close()
