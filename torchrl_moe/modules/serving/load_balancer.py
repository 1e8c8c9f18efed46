"""Which replica takes the next request, and the lease by which its load is counted exactly once.

It never waits and never asks a replica anything: load is counted here, at ``acquire`` and ``release``. Waiting for a
replica to come back is the service's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torchrl_moe._errors import NoReplicaError, StaleReplicaError
from torchrl_moe.modules.serving.roster import Roster, RosterEntry
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.modules.serving.strategies import LeastRequests, RoutingContext, Strategy, make_strategy

__all__ = ["Lease", "LoadBalancer"]


class Lease:
    """One request's place on a replica. Release it once the request is over; releasing twice does nothing.

    Attributes:
        index: the replica.
        version: the weight version that it held when the lease was given.
    """

    __slots__ = ("_roster", "index", "version")

    def __init__(self, roster: Roster, index: int, version: int) -> None:
        self._roster: Roster | None = roster
        self.index = index
        self.version = version

    def release(self) -> None:
        """Give the place back."""
        roster = self._roster
        if roster is None:
            return
        with roster.changed:  # two threads may both have come this far
            if self._roster is not None:
                self._roster = None
                roster.give_back(self.index)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease(replica={self.index}, version={self.version}, {'held' if self._roster else 'released'})"


class LoadBalancer:
    """Chooses replicas by a hierarchy of strategies: the first that has an opinion wins, the least loaded if none has.

    Args:
        engine_or_actors: a service, or a list of replicas (all taken to be serving).
        strategy: a name, a strategy object, or a list of them in order of precedence.

    Raises:
        ValueError: an unknown name, or an empty list of strategies.

    >>> lb = LoadBalancer(["a", "b"], "requests")
    >>> with lb.acquire() as first, lb.acquire() as second:
    ...     first.index, second.index
    (0, 1)
    """

    def __init__(self, engine_or_actors: Any, strategy: str | Strategy | Sequence[str | Strategy] = "requests") -> None:
        roster = getattr(engine_or_actors, "roster", None)
        if roster is None:
            if not isinstance(engine_or_actors, Sequence) or isinstance(engine_or_actors, str) or not engine_or_actors:
                raise ValueError(f"expected a service or a non-empty list of replicas, got {engine_or_actors!r}")
            roster = Roster(engine_or_actors, ReplicaState.SERVING)
        names = list(strategy) if isinstance(strategy, Sequence) and not isinstance(strategy, str) else [strategy]
        if not names:
            raise ValueError("strategy is empty: name at least one, for example 'requests'")
        self.roster: Roster = roster
        self.strategies: list[Strategy] = [make_strategy(item) for item in names]
        self._last_resort = LeastRequests()
        self._decisions: Counter[int] = Counter()

    def acquire(
        self,
        prompt: Any = None,
        session_id: str | None = None,
        min_version: int | None = None,
        request_context: dict[str, Any] | None = None,
    ) -> Lease:
        """Choose a replica and count a request on it. Never waits.

        Args:
            prompt: text or token ids, for strategies that look at it.
            session_id: the same for all turns of one rollout.
            min_version: the oldest weight version that will do.
            request_context: anything a strategy of yours wants to know.

        Raises:
            NoReplicaError: no replica is serving.
            StaleReplicaError: replicas serve, but none holds ``min_version``.
        """
        context = RoutingContext(prompt=prompt, session_id=session_id, request_context=request_context or {})
        with self.roster.changed:
            entry = self.roster[self._choose(self._candidates(min_version), context)]
            self.roster.reserve(entry.index)
            self._decisions[entry.index] += 1
            return Lease(self.roster, entry.index, entry.version)

    def acquire_at(self, index: int, min_version: int | None = None) -> Lease:
        """Count a request on the replica that the user names.

        Raises:
            IndexError: there is no such replica.
            NoReplicaError: it is not serving.
            StaleReplicaError: it does not hold ``min_version``.
        """
        with self.roster.changed:
            entry = self.roster[index]
            if entry.state is not ReplicaState.SERVING:
                raise NoReplicaError(f"replica {index} is {entry.state.name}, not SERVING; leave actor_index out")
            if min_version is not None and entry.version < min_version:
                raise StaleReplicaError(f"replica {index} holds version {entry.version}, asked for {min_version}")
            self.roster.reserve(index)
            self._decisions[index] += 1
            return Lease(self.roster, index, entry.version)

    def select_actor(self, prompt: Any = None, request_context: dict[str, Any] | None = None) -> int:
        """Return the index that would be chosen now, as TorchRL's balancer does; no request is counted."""
        with self.roster.changed:
            return self._choose(
                self._candidates(None), RoutingContext(prompt=prompt, request_context=request_context or {})
            )

    def _candidates(self, min_version: int | None) -> list[RosterEntry]:
        serving = [entry for entry in self.roster if entry.state is ReplicaState.SERVING]
        if not serving:
            raise NoReplicaError(f"no replica is serving: {self.roster!r}")
        if min_version is None:
            return serving
        fresh = [entry for entry in serving if entry.version >= min_version]
        if not fresh:
            newest = max(entry.version for entry in serving)
            raise StaleReplicaError(f"no serving replica holds version {min_version}; the newest is {newest}")
        return fresh

    def _choose(self, candidates: list[RosterEntry], context: RoutingContext) -> int:
        allowed = {entry.index for entry in candidates}
        for strategy in self.strategies:
            index = strategy.choose(candidates, context)
            if index is None:
                continue
            if index not in allowed:
                raise ValueError(f"strategy {strategy!r} chose replica {index!r}, not one of {sorted(allowed)}")
            return index
        return self._last_resort.choose(candidates, context)

    def get_stats(self) -> dict[str, Any]:
        """Return the balancer's own figures, under TorchRL's names where it has them; asks no replica anything."""
        turn = next((s.next_index for s in self.strategies if hasattr(s, "next_index")), 0)
        with self.roster.changed:
            return {
                "strategies": [strategy.name for strategy in self.strategies],
                "primary_strategy": self.strategies[0].name,
                "num_actors": len(self.roster),
                "round_robin_index": turn % len(self.roster),
                "actor_stats": [
                    {
                        "actor_index": entry.index,
                        "state": entry.state.name,
                        "version": entry.version,
                        "pending_requests": entry.inflight,
                        "decisions": self._decisions[entry.index],
                    }
                    for entry in self.roster
                ],
            }

    def __repr__(self) -> str:
        names = " > ".join(strategy.name for strategy in self.strategies)
        return f"LoadBalancer({names}, {self.roster!r})"
