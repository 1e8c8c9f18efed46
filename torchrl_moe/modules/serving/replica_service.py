"""The replicas of a service for its user: add, remove, pause, update and observe them.

Replicas send their stats by themselves; only ``stats`` and ``get_cache_usage`` query them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from torchrl_moe._checks import check_bool, check_number, shown
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import PauseMode, Replica, ReplicaStats
from torchrl_moe.modules.serving.candidates import FaultPolicy, ReplicaState, TableEntry
from torchrl_moe.modules.serving.event_loop import EventLoop
from torchrl_moe.modules.serving.fleet import CALL_SECONDS, SILENT, Fleet
from torchrl_moe.modules.serving.stats import (
    SHOWN_REPLICAS,
    Metrics,
    ServiceCollector,
    Totals,
    describe,
    prometheus_text,
    replica_row,
    service_html,
)
from torchrl_moe.render.tables import data_frame

if TYPE_CHECKING:
    import pandas as pd
    from prometheus_client import CollectorRegistry
    from torch import Tensor, nn

__all__ = ["ReplicaService"]

STATS_SECONDS = 5.0
START_SECONDS = 600.0
DRAIN_SECONDS = 600.0
MOST_THREADS = 32
MOST_SECONDS = 10_000_000  # a third of a year; clocks and locks take little more
MOST_ADDED = 1024  # at a time

Weights: TypeAlias = "nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"


def _check_timeout(seconds: object, none: bool = False) -> None:
    check_number("timeout_seconds", seconds, 0, MOST_SECONDS, none=none)


class ReplicaService:
    """A service without the handling of requests; thread-safe.

    Args:
        replicas: at least one, not started yet.
        faults: how faults are handled.
        make_replica: makes a new replica for an index, in place of one that died, or to be added.
        metrics: whether requests are counted.

    Attributes:
        replica_table: what is known of each replica.
        infos: the infos of the replicas that it started with.
        metrics: outcomes and durations of requests; ``metrics.summary()`` is ready for a logger.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        faults: FaultPolicy | None = None,
        make_replica: Callable[[int], Replica] | None = None,
        *,
        metrics: bool = True,
    ) -> None:
        self.faults = faults or FaultPolicy()
        self._loop = EventLoop("torchrl_moe-service")
        self._fleet = Fleet(replicas, self.faults, self._loop, make_replica)
        self.replica_table = self._fleet.table
        self.infos = self._fleet.infos
        self.metrics = Metrics(metrics)
        self._totals = Totals(self.replica_table)
        self._running = False
        self._update: Callable[[Weights], Any] | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """How many replicas the service has, serving or not."""
        return len(self.replica_table)

    @property
    def is_running(self) -> bool:
        """Whether the service was started and not shut down."""
        return self._running

    @property
    def is_frozen(self) -> bool:
        """Whether :meth:`pause` or :meth:`sleep` holds requests in flight back."""
        return self._fleet.is_frozen

    @property
    def routing_layout(self) -> RoutingLayout | None:
        """The layout of the model's routers; ``None`` if routes are not captured, as for a dense model."""
        self._check_running("routing_layout")
        return self.infos[0].layout

    def _check_running(self, what: str) -> None:
        if not self._running:
            raise RuntimeError(f"{what}: the service is not running. Start it first; after shutdown() make a new one.")

    def shutdown(self) -> None:
        """End every replica, at the same time. Idempotent; calls that wait end with an ``EngineError``."""
        self._running = False
        self._fleet.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def add_replicas(self, count: int = 1, *, timeout_seconds: float | None = None) -> list[int]:
        """Start more replicas, and wait until they serve: with the current weights, and paused if the service is.

        A replica that needs weights which no sender can load stays STARTING until the next update.

        Args:
            count: how many.
            timeout_seconds: for all of them; default: 600.

        Returns:
            Their indices. No index is used twice.

        Raises:
            ValueError: less than one, or there are no devices left for them.
            EngineError: one did not start, or not in time; then none is added.
        """
        self._check_running("add_replicas")
        check_number("count", count, 1, MOST_ADDED, whole=True)
        _check_timeout(timeout_seconds, none=True)
        indices = self._fleet.add(count, START_SECONDS if timeout_seconds is None else timeout_seconds)
        self._resized()
        return indices

    def remove_replica(self, index: int, *, drain: bool = True, timeout_seconds: float = DRAIN_SECONDS) -> None:
        """End a replica for good; the others keep their indices.

        Args:
            index: of the replica.
            drain: whether its requests may finish first; otherwise they start again on the others.
            timeout_seconds: for that, and for a running update of its weights.

        Raises:
            IndexError: there is no such replica.
            ValueError: it is the only one, or was removed before.
            EngineError: its requests were not finished in time; then it keeps serving.
        """
        self._check_running("remove_replica")
        check_number("index", index, whole=True)
        check_bool("drain", drain)
        _check_timeout(timeout_seconds)
        self._fleet.remove(index, drain, timeout_seconds)
        self._resized()

    def _resized(self) -> None:
        """Called when there are more replicas, or fewer."""

    # -- commands to all replicas -----------------------------------------------------------------------------------

    def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, timeout_seconds: float = CALL_SECONDS
    ) -> None:
        """Stop scheduling on all replicas; one that is restarted meanwhile comes back paused.

        Args:
            mode: for requests in flight: ``keep`` freezes them until :meth:`resume`, ``wait`` lets them finish first,
                ``abort`` cuts them short.
            clear_cache: whether to drop the KV cache too; frozen requests are then recomputed.
            timeout_seconds: deadline per replica.

        Raises:
            EngineError: a replica failed, or was not paused in time. Unless the service was paused before, all resume.
        """
        self._check_running("pause")
        check_bool("clear_cache", clear_cache)
        _check_timeout(timeout_seconds)
        self._fleet.pause(mode, clear_cache, timeout_seconds)

    def resume(self, *, timeout_seconds: float = CALL_SECONDS) -> None:
        """Resume scheduling on all replicas."""
        self._check_running("resume")
        _check_timeout(timeout_seconds)
        self._fleet.resume(timeout_seconds)

    def sleep(self, level: int = 1, mode: PauseMode = "wait", *, timeout_seconds: float = CALL_SECONDS) -> None:
        """Release the GPU memory of all replicas, for example for the trainer on the same GPU.

        New requests wait for :meth:`wake_up`. A weight update wakes only the weights. The engines need
        ``enable_sleep_mode=True`` and GPUs. No effect if they already sleep.

        Args:
            level: 1 drops the KV cache and keeps the weights in host memory, 2 drops both: then the weights must be
                updated before :meth:`wake_up`.
            mode: for requests in flight, as in :meth:`pause`; by default they finish first.
            timeout_seconds: deadline per replica.

        Raises:
            ValueError: another level, or an engine without sleep mode.
            EngineError: a replica failed, or did not sleep in time. Unless all slept before, all are woken.
        """
        self._check_running("sleep")
        check_number("level", level, 1, 2, whole=True)
        _check_timeout(timeout_seconds)
        self._fleet.sleep(level, mode, timeout_seconds)

    def wake_up(self, tags: Sequence[str] | None = None, *, timeout_seconds: float = CALL_SECONDS) -> None:
        """Allocate the memory again, and resume once all of it is there. Idempotent.

        Args:
            tags: ``["weights"]``, or ``["kv_cache"]`` for the rest; by default both.
            timeout_seconds: deadline per replica.

        Raises:
            ValueError: another tag.
            EngineError: a replica failed, or its weights were dropped and not updated since.
        """
        self._check_running("wake_up")
        if tags is not None and (not isinstance(tags, list | tuple | set) or not tags):
            raise ValueError(f"tags must be a list with 'weights', 'kv_cache' or both, or None, got {shown(tags)}.")
        _check_timeout(timeout_seconds)
        self._fleet.wake_up(tags, timeout_seconds)

    def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes; return False if a replica could not, because requests are running."""
        self._check_running("reset_prefix_cache")
        return self._fleet.reset_prefix_cache()

    def set_seed(self, seed: int) -> int:
        """Seed the sampling of the replicas, each differently. What they draw also depends on batching.

        A request with ``SamplingParams.seed`` uses only that seed. A restarted replica has its initial seed.

        Returns:
            The next seed to use.
        """
        self._check_running("set_seed")
        check_number("seed", seed, 0, 2**32 - 1 - self.num_replicas, whole=True)  # NumPy has no larger ones
        self._fleet.on_all(lambda replica: replica.call(Engine.set_seed, CALL_SECONDS, seed + replica.index))
        return seed + self.num_replicas

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> list[list[Any]]:
        """Call a method of every vLLM worker of every replica; one list of results per replica. Plain data only."""
        self._check_running("collective_rpc")
        seconds = CALL_SECONDS if timeout is None else timeout
        return self._fleet.on_all(lambda replica: replica.call(Engine.collective_rpc, seconds, method, args, kwargs))

    def register_weight_sync(
        self, bring: Callable[[int], None] | None, update: Callable[[Weights], Any] | None = None
    ) -> None:
        """Register the functions that load weights here, replacing earlier ones.

        Args:
            bring: brings a STARTING replica to the newest weights and to SERVING; ``None``: nothing does. A restarted
                replica holds its checkpoint's weights: it serves once ``bring(index)`` has returned.
            update: updates all replicas to new weights, for :meth:`update_weights`.
        """
        self._fleet.bring, self._update = bring, update

    @property
    def weight_sync(self) -> Callable[[int], None] | None:
        """The ``bring`` that was registered last."""
        return self._fleet.bring

    def update_weights(self, weights: Weights) -> Any:
        """Update all replicas to these weights, with the sender that has this engine. TorchRL's name.

        Args:
            weights: checkpoint names, or those of the sender's registered model, and tensors; the whole model. Without
                any, a warning is shown and nothing is done.

        Returns:
            The sender's :class:`~torchrl_moe.weight_update.SyncReport`; ``None`` if there were no weights.

        Raises:
            RuntimeError: the service is not running, or no sender has it.
            WeightSyncError: see the sender's ``update_weights``.
        """
        self._check_running("update_weights")
        is_named = isinstance(weights, Mapping | Iterable) and not isinstance(weights, str | bytes)
        if not (is_named or hasattr(weights, "state_dict")):
            kind = type(weights).__name__
            raise TypeError(f"weights must be a model, a TensorDict, or names and tensors, got {kind}")
        given = list(weights) if isinstance(weights, Iterator) else weights
        if given == [] or (isinstance(given, Mapping) and not list(given.keys())):
            warnings.warn("update_weights: no weights were given; nothing was done", stacklevel=2)
            return None
        return self._check_sender("update_weights")(given)

    def _check_sender(self, what: str) -> Callable[[Weights], Any]:
        """Return the function that a sender registered to load weights."""
        if self._update is None:
            raise RuntimeError(
                f"{what}: no sender has this engine. Make one: VLLMWeightSyncScheme(...).create_sender(), then "
                "sender.init_all_workers_group(None, vllm_engine=engine)"
            )
        return self._update

    # -- stats ------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a request would be taken now: the service runs, and a replica serves. TorchRL's name."""
        return self.is_running and any(entry.may_take for entry in self.replica_table)

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """Requests in flight as the service counts them, of one replica or a list of all."""
        self._check_running("get_num_unfinished_requests")
        check_number("actor_index", actor_index, whole=True, none=True)
        if actor_index is not None:
            return self.replica_table[actor_index].inflight
        return [entry.inflight for entry in self.replica_table]

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Share of KV-cache blocks in use, 0 to 1, of one replica or a list of all, as the engine reports it.

        NaN for a replica that is dead or starting.
        """
        self._check_running("get_cache_usage")
        check_number("actor_index", actor_index, whole=True, none=True)
        self._fleet.note_deaths()
        if actor_index is not None:
            return _cache_usage(self.replica_table[actor_index])
        return [_cache_usage(entry) for entry in self.replica_table]

    def stats(self, timeout_seconds: float = STATS_SECONDS) -> list[dict[str, object]]:
        """Return one flat dictionary per replica: state, version, and its engine's current stats.

        All are queried at the same time. One that does not answer shows the stats that it sent last; a dead one shows
        no engine stats. ``supervisor_error`` is ``None`` while deaths and stalls are being detected. Counts start with
        its engine; see :class:`~torchrl_moe.modules.backends.replica.ReplicaStats`.
        """
        self._check_running("stats")
        _check_timeout(timeout_seconds)
        self._fleet.note_deaths()
        entries = list(self.replica_table)
        with ThreadPoolExecutor(min(len(entries), MOST_THREADS)) as pool:
            stats = pool.map(lambda entry: _ask(entry, timeout_seconds), entries)
            rows = [replica_row(entry, own) for entry, own in zip(entries, stats, strict=True)]
        return [{**row, "supervisor_error": self._fleet.supervisor_error} for row in rows]

    def to_pandas(self) -> pd.DataFrame:
        """Return :meth:`stats` as a pandas ``DataFrame``."""
        return data_frame(self.stats())

    def prometheus(self) -> str:
        """Return the stats of the replicas and of the service in Prometheus' text format; sends nothing to the engines.

        Raises:
            ImportError: ``prometheus_client`` is not installed; the message names the extra.
        """
        self._check_running("prometheus")
        return prometheus_text(self._collector())

    def register_prometheus(self, registry: CollectorRegistry) -> ServiceCollector:
        """Add this service to a ``prometheus_client`` registry; return the collector, to unregister it.

        Raises:
            ImportError: ``prometheus_client`` is not installed; the message names the extra.
            ValueError: the registry has a service already; give each one its own.
        """
        self._check_running("register_prometheus")
        collector = self._collector()
        registry.register(collector)
        return collector

    def _collector(self) -> ServiceCollector:
        return ServiceCollector(self.replica_table, self._totals, self.metrics)

    def log_paths(self) -> list[Path | None]:
        """Return each replica's log file on this machine; ``None`` if it is not started, or runs elsewhere."""
        return [entry.replica.log_path for entry in self.replica_table]

    def _title(self) -> str:
        model = self.infos[0].model if self.infos else "not started"
        return f"{type(self).__name__}({model!r}, {self.num_replicas} replica{'s' * (self.num_replicas != 1)})"

    def __repr__(self) -> str:
        entries = list(self.replica_table)
        lines = [self._title(), *(f"  {describe(entry)}" for entry in entries[:SHOWN_REPLICAS])]
        hidden = len(entries) - SHOWN_REPLICAS
        return "\n".join([*lines, *([f"  and {hidden} more"] if hidden > 0 else [])])

    def _repr_html_(self) -> str:
        return service_html(self._title(), list(self.replica_table), self._totals)


def _cache_usage(entry: TableEntry) -> float:
    return math.nan if entry.state in SILENT else float(entry.replica.call(Engine.stats, CALL_SECONDS).cache_usage)


def _ask(entry: TableEntry, seconds: float) -> ReplicaStats | None:
    if entry.state is ReplicaState.DEAD:
        return None
    last: ReplicaStats | None = entry.replica.last_stats
    if entry.state is ReplicaState.STARTING:
        return last
    try:
        stats: ReplicaStats = entry.replica.call(Engine.stats, seconds)
    except EngineError:  # busy, or dying: others find that out
        return last
    return stats
