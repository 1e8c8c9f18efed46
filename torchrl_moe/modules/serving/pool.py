"""The replicas of a service: their life, commands to all of them, and their stats.

They are known only by the :class:`~torchrl_moe.modules.backends.replica.Replica` protocol.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from torchrl_moe._errors import EngineError, NoReplicaError, ReplicaDiedError
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import PauseMode, Replica, ReplicaInfo
from torchrl_moe.modules.serving.candidates import Recovery
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.replica_table import ReplicaTable, TableEntry
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.modules.serving.supervisor import Supervisor, last_words

__all__ = ["CALL_SECONDS", "ReplicaPool"]

T = TypeVar("T")
CALL_SECONDS = 60.0
SILENT = frozenset({ReplicaState.DEAD, ReplicaState.STARTING})


class ReplicaPool:
    """N replicas, and what concerns all of them alike; safe to call from any thread.

    Args:
        replicas: at least one, not started yet.
        faults: how faults are treated.
        make_replica: makes a new replica for an index, in place of one that died.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        faults: FaultPolicy | None = None,
        make_replica: Callable[[int], Replica] | None = None,
    ) -> None:
        if not replicas:
            raise ValueError("a service needs at least one replica, got none")
        self.faults = faults or FaultPolicy()
        self.replica_table = ReplicaTable(replicas, faults=self.faults)
        self.infos: list[ReplicaInfo] = []
        self._running = False
        self._bring: Callable[[int], None] | None = None
        self._update: Callable[[Any], Any] | None = None
        self._paused = False  # by the user
        self._pausing = threading.Lock()
        self._supervisor = Supervisor(
            self.replica_table, self.faults, make_replica, lambda: self._bring, self._pause_as_the_others
        )

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
    def routing_layout(self) -> RoutingLayout | None:
        """What the model's routers look like; ``None`` if routes are not captured (a dense model, say)."""
        self._check_running("routing_layout")
        return self.infos[0].layout

    def _check_running(self, what: str) -> None:
        if not self._running:
            raise RuntimeError(f"{what}: the service is not running. Start it first; after shutdown() make a new one.")

    def shutdown(self) -> None:
        """End every replica, at the same time. Idempotent; calls that wait end with an ``EngineError``."""
        self._running = False
        self._supervisor.stop()
        for entry in self.replica_table:
            self.replica_table.mark_dead(entry.index)
        with ThreadPoolExecutor(max_workers=max(self.num_replicas, 1)) as pool:
            list(pool.map(lambda entry: entry.replica.shutdown(), self.replica_table))
        self._supervisor.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @contextlib.contextmanager
    def _noting_deaths(self) -> Iterator[None]:
        try:
            yield
        except ReplicaDiedError:
            self._note_deaths()
            raise

    def _note_deaths(self) -> None:
        for entry in self.replica_table:
            replica = entry.replica
            if entry.state not in SILENT and not replica.is_alive():
                self.replica_table.mark_dead(entry.index, last_words(replica), replica)

    # -- commands to all replicas -----------------------------------------------------------------------------------

    def _alive(self) -> list[TableEntry]:
        """The replicas that can answer; one that has died unnoticed is noted here."""
        self._note_deaths()
        alive = [entry for entry in self.replica_table if entry.state not in SILENT]
        if not alive:
            coming = any(entry.recovery is not Recovery.NOBODY for entry in self.replica_table)
            advice = "Wait for their restart." if coming else "Make a new service."
            raise NoReplicaError(f"no replica is alive: {self.replica_table!r}. {advice}")
        return alive

    def _on_all(self, what: str, command: Callable[[Replica], T]) -> list[T]:
        """Run a command on every living replica at the same time and return the values in replica order.

        Raises:
            EngineError: a replica failed, or did not answer in time.
        """
        self._check_running(what)
        alive = self._alive()
        with ThreadPoolExecutor(max_workers=len(alive)) as pool:
            futures = [pool.submit(command, entry.replica) for entry in alive]
        with self._noting_deaths():
            return [future.result() for future in futures]

    def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, timeout_seconds: float = CALL_SECONDS
    ) -> None:
        """Stop scheduling on all replicas; one that is restarted meanwhile comes back paused.

        Args:
            mode: of requests in flight: ``keep`` freezes them until :meth:`resume`, ``wait`` lets them finish first,
                ``abort`` cuts them short.
            clear_cache: whether to drop the KV cache too; frozen requests are then recomputed.
            timeout_seconds: deadline per replica.

        Raises:
            EngineError: a replica failed, or was not paused in time. Unless the service was paused before, all go on.
        """
        if mode not in ("keep", "wait", "abort"):
            raise ValueError(f"mode must be 'keep', 'wait' or 'abort', got {mode!r}")
        before = self._note_pause(True)
        try:
            self._on_all("pause", lambda replica: replica.pause(mode, clear_cache, timeout_seconds))
        except BaseException:
            if not before:
                self._take_back_pause(timeout_seconds)
            raise
        if clear_cache:
            self._forget_prefixes()

    def resume(self, *, timeout_seconds: float = CALL_SECONDS) -> None:
        """Go on scheduling on all replicas."""
        self._note_pause(False)
        self._on_all("resume", lambda replica: replica.resume(timeout_seconds))

    def _take_back_pause(self, seconds: float) -> None:
        """Resume the replicas that a pause has reached: also one that it waits for takes nothing new."""
        self._note_pause(False)
        with contextlib.suppress(EngineError, RuntimeError):  # none is alive, or the service was shut down
            self._on_all("resume", lambda replica: replica.resume(seconds))

    def _note_pause(self, paused: bool) -> bool:
        """Note what the user wants, before replicas are told, and return what it was before."""
        with self._pausing:
            before, self._paused = self._paused, paused
            return before

    def _pause_as_the_others(self, replica: Replica, serve: Callable[[], bool]) -> bool:
        """Pause a replica if all are, then have it serve. Under the lock: a resume comes before this, or reaches it."""
        with self._pausing:
            if self._paused:
                replica.pause("keep", False, CALL_SECONDS)
            return serve()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; false if some replica could not, because requests are running."""
        done = all(self._on_all("reset_prefix_cache", lambda replica: replica.reset_prefix_cache(CALL_SECONDS)))
        self._forget_prefixes()
        return done

    def _forget_prefixes(self) -> None:
        for entry in self.replica_table:
            self.replica_table.forget_prefixes(entry.index)

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        """Call a method of every vLLM worker of every replica; one list of results per replica. Plain data only."""
        seconds = CALL_SECONDS if timeout is None else timeout
        return self._on_all("collective_rpc", lambda replica: replica.collective_rpc(method, args, kwargs, seconds))

    def register_weight_sync(
        self, bring: Callable[[int], None] | None, update: Callable[[Any], Any] | None = None
    ) -> None:
        """Take what brings weights here, in place of what was registered before.

        Args:
            bring: brings a replica that is STARTING to the newest weights and to SERVING; ``None``: nobody does. A
                replica that was restarted holds its checkpoint's weights: it serves once ``bring(index)`` has returned.
            update: brings all replicas to new weights, for :meth:`update_weights`.
        """
        self._bring, self._update = bring, update

    @property
    def weight_sync(self) -> Callable[[int], None] | None:
        """The ``bring`` that :meth:`register_weight_sync` took last."""
        return self._bring

    def update_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Any:
        """Bring all replicas to these weights, by the sender that was given this engine. TorchRL's name.

        Args:
            weights: checkpoint names, or those of the sender's registered model, and tensors; the whole model. If there
                are none, a warning says so, and nothing is done.

        Returns:
            The sender's :class:`~torchrl_moe.weight_update.SyncReport`; ``None`` if there were no weights.

        Raises:
            RuntimeError: the service is not running, or no sender has it.
            WeightSyncError: see the sender's ``update_weights``.
        """
        self._check_running("update_weights")
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        if not pairs:
            warnings.warn("update_weights: no weights were given; nothing was done", stacklevel=2)
            return None
        if self._update is None:
            raise RuntimeError(
                "update_weights: no sender has this engine. Make one: VLLMWeightSyncScheme(...).create_sender(), then "
                "sender.init_all_workers_group(None, vllm_engine=engine)"
            )
        return self._update(pairs)

    # -- stats ----------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a request would be taken now: the service runs, and a replica serves. TorchRL's name."""
        return self.is_running and any(entry.may_take for entry in self.replica_table)

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """Requests in flight as the service counts them, of one replica or a list of all."""
        self._check_running("get_num_unfinished_requests")
        if actor_index is not None:
            return self.replica_table[actor_index].inflight
        return [entry.inflight for entry in self.replica_table]

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Share of KV-cache blocks in use, 0 to 1, of one replica or a list of all: the engine's own figure.

        NaN stands for a replica that is dead or starting.
        """
        self._check_running("get_cache_usage")
        self._note_deaths()
        if actor_index is not None:
            return _cache_usage(self.replica_table[actor_index])
        return [_cache_usage(entry) for entry in self.replica_table]


def _cache_usage(entry: TableEntry) -> float:
    return math.nan if entry.state in SILENT else float(entry.replica.stats(CALL_SECONDS).cache_usage)
