"""The balancer: leases on replicas, counted here and released once; TorchRL's handles of single replicas."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Never, cast

from torchrl_moe._checks import check_number, shown
from torchrl_moe.errors import NoReplicaError, StaleReplicaError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.serving.fleet import CALL_SECONDS
from torchrl_moe.modules.serving.replica_table import Candidates, ReplicaState, ReplicaTable, TableEntry
from torchrl_moe.modules.serving.strategies import (
    DEFAULT_HIERARCHY,
    OVERLOAD_THRESHOLD,
    REPORT_SECONDS,
    STRATEGIES,
    RoundRobin,
    RoutingContext,
    Settings,
    Strategy,
    make_strategy,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_moe.modules.backends.replica import Completion, Replica
    from torchrl_moe.modules.serving.requests import SamplingParams


# The lease: a request's claim on a replica, which counts its load exactly once.


class Lease:
    """One request's claim on a replica. Release it when the request is over; a second release has no effect.

    A ``with`` block releases it; an error in the block is no success for a replica that was on trial.

    Attributes:
        index: the replica.
        version: the weight version that it held when the lease was granted.
        replica: the replica object; a restart may have replaced it before the lease is used.
    """

    __slots__ = ("_over", "_table", "_trial", "index", "replica", "version")

    def __init__(
        self, table: ReplicaTable, entry: TableEntry, trial: bool, over: Callable[[bool | None], object] | None
    ) -> None:
        self._table: ReplicaTable | None = table
        self._trial = trial
        self._over = over
        self.index = entry.index
        self.version = entry.version
        self.replica = entry.replica

    def release(self, success: bool | None = True) -> None:
        """Release the claim.

        Args:
            success: whether the replica answered; ``None`` if nothing was sent, or the request was aborted.
        """
        table = self._table
        if table is None:
            return
        with table.lock:  # two threads may both have come this far
            if self._table is not None:
                self._table = None
                table.give_back(self.index, self._trial, success)
                if self._over is not None:
                    self._over(success)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.release(True if kind is None else None)  # whose error it was is not known

    def __repr__(self) -> str:
        return f"Lease(replica={self.index}, version={self.version}, {'held' if self._table else 'released'})"


# The replicas of an engine one by one, under TorchRL's names for its actors' methods.


WEIGHTS = "weights come by a sender, which checks them: VLLMWeightSyncScheme(...).create_sender()"
INSTEAD = {
    "collective_rpc_v0": "engine.collective_rpc(...) calls the workers of all replicas",
    "collective_rpc_v1": "engine.collective_rpc(...) calls the workers of all replicas",
    "init_weight_transfer_engine": WEIGHTS,
    "load_weights_from_storage": WEIGHTS,
    "sleep": "replicas sleep together: engine.sleep()",
    "update_weights_native": WEIGHTS,
    "wake_up": "replicas wake up together: engine.wake_up()",
}
"""Methods that TorchRL's actors have and a handle lacks -> what to do instead."""


@dataclass(frozen=True, repr=False)
class ActorHandle:
    """A handle of one replica of an engine: its methods run on this replica. ``engine.actors`` lists the handles.

    It is not a Ray actor: its methods are called as they are, without ``.remote``.
    """

    engine: Any  # a GenerationService, which is built on this file
    index: int

    def generate(
        self, prompts: object = None, sampling_params: SamplingParams | None = None, **kwargs: Any
    ) -> Completion | list[Completion]:
        """Generate as the engine does; arguments as in :meth:`GenerationService.generate`, without ``actor_index``."""
        return self.engine.generate(prompts, sampling_params, actor_index=self.index, **kwargs)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        return self.engine.get_tokenizer()

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that this driver has in flight there."""
        return self.engine.get_num_unfinished_requests(self.index)

    def get_cache_usage(self) -> float:
        """Return the share of KV-cache blocks in use, 0 to 1; NaN if it is dead or starting."""
        return self.engine.get_cache_usage(self.index)

    def get_world_size(self) -> int:
        """Return the number of its devices: tensor x pipeline x data parallel ranks."""
        info = self.engine.infos[0]
        return info.tensor_parallel_size * info.pipeline_parallel_size * info.data_parallel_size

    def ready(self) -> bool:
        """Whether it would accept a request now."""
        return self.engine.is_running and self.engine.replica_table[self.index].may_take

    def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes; return False if it could not, because requests are running."""
        table = self.engine.replica_table
        done = table[self.index].replica.call(Engine.reset_prefix_cache, CALL_SECONDS)
        table.forget_prefixes(self.index)
        return done

    def __getattr__(self, name: str) -> Never:
        if name in INSTEAD:
            raise AttributeError(f"a replica of this engine has no {name}: {INSTEAD[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine.replica_table[self.index]!r})"


# Which replica takes the next request.
#
# It never waits and sends nothing to a replica: load is counted here, at ``acquire`` and ``release``. The service
# waits for replicas that are not serving.


class LoadBalancer:
    """Chooses replicas by a hierarchy of strategies: the first that has an opinion wins, the least loaded if none has.

    Args:
        actors: a service, all of its ``actors``, or a list of arbitrary replicas (all considered serving).
        strategy: a name, a strategy object, or a list of them in order of precedence; default: ``prefix-aware``, then
            ``requests``. Names: ``prefix-aware``, ``session``, ``requests`` (``least-loaded``), ``kv-cache``,
            ``power-of-two``, ``round-robin``, with hyphens or underscores.
        prefix_length: leading tokens that ``prefix-aware`` looks at; ``None`` for all.
        overload_threshold: prefix and session affinity end at this multiple of the mean load, but not below one request
            above the mean (two for sessions).
        clock: returns seconds; for whatever ages.
        rng: source of random draws.

    Attributes:
        async_vllm: the service; ``None`` over a list.

    Raises:
        ValueError: an unknown name, an empty list, or a number out of range.
        TypeError: a strategy that is no name and no ``Strategy``.

    >>> lb = LoadBalancer(["a", "b"], "requests")
    >>> with lb.acquire() as first, lb.acquire() as second:
    ...     first.index, second.index
    (0, 1)
    """

    def __init__(
        self,
        actors: object,
        strategy: str | Strategy | Sequence[str | Strategy] | None = None,
        prefix_length: int | None = None,
        overload_threshold: float = OVERLOAD_THRESHOLD,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.async_vllm = _service_of(actors)
        if self.async_vllm is None:  # over a list nothing is called on its members: they may be anything
            self.replica_table = ReplicaTable(cast("Sequence[Replica]", actors), ReplicaState.SERVING)
        else:
            self.replica_table = self.async_vllm.replica_table
        self.groups = self.replica_table.groups
        self._settings = Settings(
            prefix_length=prefix_length, overload_threshold=overload_threshold, clock=clock, rng=rng
        )
        given: str | Strategy | Sequence[str | Strategy] = DEFAULT_HIERARCHY if strategy is None else strategy
        listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        if not listed:
            raise ValueError(
                "strategy is empty: name at least one, for example 'requests'; valid strategies: "
                + ", ".join(sorted(STRATEGIES))
            )
        self._strategies = [make_strategy(item, self._settings) for item in listed]
        self._warned: set[int] = set()
        self._reads_stats = any(strategy.reads_stats for strategy in self._strategies)
        self._clock = clock
        self._decisions: Counter[int] = Counter()

    # -- TorchRL's names --------------------------------------------------------------------------------------------

    @property
    def actors(self) -> list[object]:
        """The replicas: the engine's ``actors``, or what the list held."""
        handles = getattr(self.async_vllm, "actors", None)
        return [entry.replica for entry in self.replica_table] if handles is None else list(handles)

    @property
    def strategies(self) -> list[str]:
        """The strategies' names, in order of precedence."""
        return [strategy.name for strategy in self._strategies]

    @property
    def strategy(self) -> str:
        """The first strategy's name."""
        return self.strategies[0]

    @property
    def prefix_length(self) -> int | None:
        """Leading tokens that ``prefix-aware`` looks at; ``None`` for all."""
        return self._settings.prefix_length

    @property
    def overload_threshold(self) -> float:
        """Affinity ends at this multiple of the mean load."""
        return self._settings.overload_threshold

    # -- choosing ---------------------------------------------------------------------------------------------------

    def acquire(
        self,
        prompt: Sized | None = None,
        session_id: str | None = None,
        min_version: int | None = None,
        request_context: Mapping[str, object] | None = None,
        group_id: str | None = None,
    ) -> Lease:
        """Choose a replica and count a request on it. Never waits.

        Args:
            prompt: text, token ids or a chat, for strategies that look at it.
            session_id: the same for all turns of one rollout.
            min_version: the oldest weight version that is acceptable.
            request_context: input for your own strategies.
            group_id: all requests of a group go to one weight version, the newest that serves when the first arrives.
                If the replicas of all its requests die before one has answered, the group may move to another version.

        Raises:
            NoReplicaError: no replica is serving.
            StaleReplicaError: replicas serve, but none holds ``min_version``, or the group's version.
        """
        _check_wishes(min_version, session_id, group_id)
        context = RoutingContext(prompt=prompt, session_id=session_id, request_context=request_context or {})
        with self.replica_table.lock:
            return self._lease(self._choose(context, min_version, group_id), context, group_id)

    def acquire_at(
        self,
        index: int,
        min_version: int | None = None,
        prompt: Sized | None = None,
        session_id: str | None = None,
        group_id: str | None = None,
        *,
        alone: bool = False,
    ) -> Lease:
        """Count a request on the replica that the caller names; arguments as in :meth:`acquire`.

        ``alone``: this is the request that the replica is reserved for.

        Raises:
            IndexError: there is no such replica.
            NoReplicaError: it is not serving.
            StaleReplicaError: it does not hold ``min_version``, or not the group's version.
        """
        check_number("index", index, whole=True)
        _check_wishes(min_version, session_id, group_id)
        with self.replica_table.lock:
            entry = self.replica_table[index]
            if entry.leaving and not entry.removed:
                raise NoReplicaError(f"replica {index} is being removed; leave actor_index out")
            if entry.state is not ReplicaState.SERVING:
                raise NoReplicaError(f"replica {index} is {entry.state.name}, not SERVING; leave actor_index out")
            if entry.reserved and not alone:
                raise NoReplicaError(f"replica {index} tries a request alone, under which another replica died")
            if min_version is not None and entry.version < min_version:
                raise StaleReplicaError(f"replica {index} holds version {entry.version}, asked for {min_version}")
            version = None if group_id is None else self.groups.version(group_id)
            if version not in (None, entry.version):
                raise StaleReplicaError(
                    f"replica {index} holds version {entry.version}, but group {group_id!r} is on version {version}"
                )
            return self._lease(entry, RoutingContext(prompt=prompt, session_id=session_id), group_id)

    def select_actor(self, prompt: Sized | None = None, request_context: Mapping[str, object] | None = None) -> int:
        """Return the replica that takes a request, as TorchRL's balancer does; the request is not counted."""
        context = RoutingContext(prompt=prompt, request_context=request_context or {})
        with self.replica_table.lock:
            entry = self._choose(context)
            self.replica_table.touch(entry.index)  # so that other replicas get their turn
            self._learn(entry, context)
            return entry.index

    def _choose(
        self, context: RoutingContext, min_version: int | None = None, group_id: str | None = None
    ) -> TableEntry:
        """Choose among the replicas that may take a request: the first strategy with an opinion wins.

        One that raises, or chooses a replica that may not take it, counts as having none; a warning is shown once.
        """
        table = self.replica_table
        if table.reports:
            table.expire(self._clock() - REPORT_SECONDS)
        if self._reads_stats:
            table.read_stats()
        candidates = table.serving()
        if not candidates:
            raise NoReplicaError(f"no replica is serving: {table!r}")
        if group_id is not None:
            candidates = self._of_group(group_id, min_version)
        elif min_version is not None and not (candidates := table.serving(min_version)):
            raise StaleReplicaError(
                f"no serving replica holds version {min_version}; the newest is {table.newest_version}"
            )
        for strategy in self._strategies:
            try:
                index = strategy.choose(candidates, context)
                entry = None if index is None else candidates.find(index)
            except Exception as error:  # noqa: BLE001  user code; requests must still be placed
                self._warn(strategy, f"failed with {error!r}")
                continue
            if entry is not None:
                return entry
            if index is not None:
                allowed = ", ".join(str(candidate.index) for candidate in candidates)
                self._warn(strategy, f"chose replica {index!r}, not one of {allowed}")
        return candidates.least_loaded()

    def _of_group(self, group_id: str, min_version: int | None) -> Candidates:
        """Return the replicas of a group's version, or of the newest if it has none yet."""
        table, version = self.replica_table, self.groups.version(group_id)
        version = table.newest_version if version is None else version
        if min_version is not None and version < min_version:
            raise StaleReplicaError(f"group {group_id!r} is on version {version}, asked for {min_version}")
        if not (candidates := table.serving(version, version)):
            raise StaleReplicaError(
                f"no serving replica holds version {version}, which group {group_id!r} began on; the newest is "
                f"{table.newest_version}. Begin the group again, under another id."
            )
        return candidates

    def _learn(self, entry: TableEntry, context: RoutingContext) -> None:
        self._tell("learn", lambda strategy: strategy.placed(entry, context))

    def _tell(self, what: str, tell: Callable[[Strategy], object]) -> None:
        for strategy in self._strategies:
            try:
                tell(strategy)
            except Exception as error:  # noqa: BLE001  as above
                self._warn(strategy, f"failed to {what} with {error!r}")

    def _warn(self, strategy: Strategy, what: str) -> None:
        if id(strategy) not in self._warned:
            self._warned.add(id(strategy))
            warnings.warn(f"strategy {strategy.name!r} {what}; the next strategy is used. Shown once.", stacklevel=4)

    def _lease(self, entry: TableEntry, context: RoutingContext, group_id: str | None) -> Lease:
        self._learn(entry, context)  # first, while nothing is counted: warnings may be errors
        trial = self.replica_table.reserve(entry.index)
        self._decisions[entry.index] += 1
        over = None if group_id is None else self.groups.join(group_id, entry.version)
        return Lease(self.replica_table, entry, trial, over)

    def finish_session(self, session_id: str) -> None:
        """End a session; otherwise it counts as active until it was idle for ten minutes."""
        with self.replica_table.lock:
            self._tell("finish a session", lambda strategy: strategy.finish_session(session_id))

    # -- stats ----------------------------------------------------------------------------------------------------

    def observe(self, index: int, pending_requests: int | None = None, cache_usage: float | None = None) -> None:
        """Report a replica's load from elsewhere; it is used for five seconds.

        Args:
            index: the replica; ``IndexError`` if there is none.
            pending_requests: its requests, counted if more than are counted here: other callers may share the replica.
            cache_usage: share of KV-cache blocks in use, 0 to 1, for ``kv-cache``; until the replica's own next report,
                if that is earlier.

        Raises:
            ValueError: a number out of range.
        """
        check_number("index", index, whole=True)
        check_number("pending_requests", pending_requests, 0, 2**31 - 1, whole=True, none=True)
        check_number("cache_usage", cache_usage, 0, 1, none=True)
        with self.replica_table.lock:  # times must be noted in their order
            self.replica_table.observe(index, self._clock(), pending_requests, cache_usage)

    def get_stats(self) -> dict[str, object]:
        """Return the balancer's own stats, under TorchRL's names where it has them; sends nothing to replicas.

        ``cache_usage`` is the last value that the replica sent or :meth:`observe` was given, or ``None``.
        """
        turn = next((one.next_index for one in self._strategies if isinstance(one, RoundRobin)), 0)
        with self.replica_table.lock:
            self.replica_table.read_stats()
            return {
                "strategies": self.strategies,
                "primary_strategy": self.strategy,
                "num_actors": len(self.replica_table),
                "prefix_length": self.prefix_length,
                "overload_threshold": self.overload_threshold,
                "round_robin_index": turn % len(self.replica_table),
                "actor_stats": [
                    {
                        "actor_index": entry.index,
                        "state": entry.state.name,
                        "version": entry.version,
                        "pending_requests": entry.load,
                        "cache_usage": None if entry.usage is None else entry.usage.share,
                        "decisions": self._decisions[entry.index],
                    }
                    for entry in self.replica_table
                ],
            }

    def __repr__(self) -> str:
        return f"LoadBalancer({' > '.join(self.strategies)}, {self.replica_table!r})"


def _check_wishes(min_version: object, session_id: object, group_id: object) -> None:
    check_number("min_version", min_version, whole=True, none=True)
    for name, value in (("session_id", session_id), ("group_id", group_id)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be text, or None, got {shown(value)}.")


def _service_of(actors: object) -> Any:
    """Return the service, or that of its actors; ``None`` for a list of replicas without one."""
    if hasattr(actors, "replica_table"):
        return actors
    if not isinstance(actors, Sequence) or isinstance(actors, str) or not actors:
        raise ValueError(f"expected a service or a non-empty list of replicas, got {actors!r}")
    if not any(isinstance(actor, ActorHandle) for actor in actors):
        return None
    service = getattr(actors[0], "engine", None)
    if list(actors) != getattr(service, "actors", None):
        raise ValueError("expected all actors of one engine, in their order: pass engine.actors, or the engine")
    return service
