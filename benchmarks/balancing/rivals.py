"""Ways of placing requests on a simulated fleet: ours, TorchRL's own class, and the field's usual ones."""

# ruff: noqa: ARG002  each policy has the protocol's signatures

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import xxhash

from benchmarks.balancing.fleet import Fleet, SimRequest
from torchrl_moe.modules import Lease, LoadBalancer
from torchrl_moe.modules.serving.replica_table import ReplicaState

__all__ = ["AFFINE", "BOUNDED", "RIVALS", "Oracle", "Ours"]


class Rival:
    """A policy that sees the fleet's loads and which replicas are up."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.rng = random.Random(0)
        self._turn = 0

    def least(self, indices: Sequence[int] | None = None) -> int:
        """The least loaded, ties at random."""
        loads = self.fleet.loads
        return min(self.fleet.up if indices is None else indices, key=lambda i: (loads[i], self.rng.random()))

    def place(self, request: SimRequest) -> int:
        """The least loaded."""
        return self.least()

    def finished(self, request: SimRequest, index: int) -> None:
        """Nothing to do."""

    def ended(self, session: str) -> None:
        """Nothing to do."""

    def changed(self, index: int, up: bool) -> None:
        """Nothing to do."""


class RoundRobin(Rival):
    """In turn."""

    def place(self, request: SimRequest) -> int:
        """The next one."""
        self._turn += 1
        return self.fleet.up[self._turn % len(self.fleet.up)]


class PowerOfTwo(Rival):
    """The lesser of two."""

    def place(self, request: SimRequest) -> int:
        """The lesser of two drawn at random."""
        return self.least(self.rng.sample(self.fleet.up, 2))


class ConsistentHash(Rival):
    """A ring of 160 points per replica, by session."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        points = [(self._hash(f"{i}-{k}"), i) for i in range(fleet.spec.replicas) for k in range(160)]
        self._ring = sorted(points)
        self._keys = [key for key, _ in self._ring]

    def _hash(self, text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def place(self, request: SimRequest) -> int:
        """The first replica at or after the session's point that is up."""
        return self._at(self._hash(request.session))

    def _at(self, key: int) -> int:
        start = bisect_left(self._keys, key)
        up = set(self.fleet.up)
        return next(i for k in range(len(self._ring)) if (i := self._ring[(start + k) % len(self._ring)][1]) in up)


class PrefixHash(ConsistentHash):
    """The ring by the first 256 tokens; the least loaded if that one has more than 1.25 times the mean."""

    def place(self, request: SimRequest) -> int:
        """By prefix, with a load bound."""
        index = self._at(xxhash.xxh3_64_intdigest(request.ids[:256].tobytes()))
        mean = (self.fleet.total + 1) / len(self.fleet.up)
        return self.least() if self.fleet.loads[index] > 1.25 * mean else index


class CacheAware(Rival):
    """A prefix tree per replica; the longest match above a threshold, or the least loaded when loads are far apart."""

    MATCH, ABSOLUTE, RELATIVE, SEGMENTS = 0.5, 32, 1.1, 20_000

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(fleet.spec.replicas)]

    def place(self, request: SimRequest) -> int:
        """By match, unless the fleet is out of balance."""
        loads = [self.fleet.loads[i] for i in self.fleet.up]
        if max(loads) - min(loads) > self.ABSOLUTE and max(loads) > self.RELATIVE * min(loads):
            index = self.least()
        else:
            matches = {i: self._match(request, i) for i in self.fleet.up}
            best = max(matches.values())
            held = [i for i in self.fleet.up if matches[i] == best]
            index = held[0] if best > self.MATCH * request.tokens else self.least()
        for name, _ in request.prompt:
            self._trees[index][name] = None
            self._trees[index].move_to_end(name)
        while len(self._trees[index]) > self.SEGMENTS:
            self._trees[index].popitem(last=False)
        return index

    def _match(self, request: SimRequest, index: int) -> int:
        found = 0
        for name, tokens in request.prompt:
            if name not in self._trees[index]:
                break
            found += tokens
        return found

    def changed(self, index: int, up: bool) -> None:
        """Forget the cache of a replica."""
        self._trees[index].clear()


class StickyLeastLoaded(Rival):
    """A session stays on its replica; a new one goes to the replica with the fewest sessions."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._where: dict[str, int] = {}
        self._sessions: Counter[int] = Counter()

    def place(self, request: SimRequest) -> int:
        """By session."""
        index = self._where.get(request.session)
        if index is None or index not in self.fleet.up:
            self.ended(request.session)
            index = min(self.fleet.up, key=lambda i: (self._sessions[i], self.rng.random()))
            self._where[request.session] = index
            self._sessions[index] += 1
        return index

    def ended(self, session: str) -> None:
        """Release the session's place."""
        index = self._where.pop(session, None)
        if index is not None:
            self._sessions[index] -= 1


class _Answer:
    """Looks like a Ray method to TorchRL's balancer; a future is its own value."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self.remote = ask


class TorchRL(Rival):
    """TorchRL's ``LoadBalancer`` as it is, over actors that answer with the fleet's loads."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        from torchrl.modules.llm.backends.vllm import vllm_async

        class Ray:
            get = staticmethod(list)

        vllm_async._get_ray = lambda: Ray
        random.seed(0)  # it draws ties from the global generator

        class Actor:
            def __init__(self, index: int) -> None:
                self.get_num_unfinished_requests = _Answer(lambda: fleet.loads[index])

        self._actors = [Actor(i) for i in range(fleet.spec.replicas)]
        self._make: Callable[[list[Any]], Any] = vllm_async.LoadBalancer
        self.changed(0, True)

    def place(self, request: SimRequest) -> int:
        """Ask it."""
        return self._up[self._balancer.select_actor(request.ids.tolist())]

    def changed(self, index: int, up: bool) -> None:
        """It does not handle dead replicas: a user makes a new balancer."""
        self._up = list(self.fleet.up)
        self._balancer = self._make([self._actors[i] for i in self._up])


class Ours:
    """Our balancer, called as the service calls it."""

    def __init__(self, fleet: Fleet, strategy: Sequence[str] | None = None) -> None:
        self.balancer = LoadBalancer(list(range(fleet.spec.replicas)), strategy, clock=lambda: fleet.now)
        self._leases: dict[int, Lease] = {}

    def place(self, request: SimRequest) -> int:
        """Take a lease."""
        lease = self.balancer.acquire(request.ids, request.session)
        self._leases[id(request)] = lease
        return lease.index

    def finished(self, request: SimRequest, index: int) -> None:
        """Release it."""
        self._leases.pop(id(request)).release()

    def ended(self, session: str) -> None:
        """Say so."""
        self.balancer.finish_session(session)

    def changed(self, index: int, up: bool) -> None:
        """Report a death or a restart, as the service does."""
        for state in (ReplicaState.STARTING, ReplicaState.SERVING) if up else (ReplicaState.DEAD,):
            self.balancer.replica_table.set_state(index, state)


class Oracle(Rival):
    """Knows what every cache really holds: the most cached tokens within our load bound, ties by load."""

    def place(self, request: SimRequest) -> int:
        """The best of those within the bound."""
        loads, mean = self.fleet.loads, (self.fleet.total + 1) / len(self.fleet.up)
        bound = self.fleet.bound(mean) - 1
        fit = [i for i in self.fleet.up if loads[i] <= bound]
        return max(fit, key=lambda i: (self.fleet.cached(request, i), -loads[i], self.rng.random()))


class Bounded:
    """Wraps another policy, which then sees only replicas that may take one more request within our load bound."""

    def __init__(self, fleet: Fleet, make: Callable[[Fleet], Rival]) -> None:
        self._fleet = fleet
        self._policy = make(fleet)
        self.finished, self.ended, self.changed = self._policy.finished, self._policy.ended, self._policy.changed

    def place(self, request: SimRequest) -> int:
        """Choose as the other policy would if only these replicas were up."""
        fleet = self._fleet
        up, most = fleet.up, fleet.bound((fleet.total + 1) / len(fleet.up)) - 1
        fleet.up = [i for i in up if fleet.loads[i] <= most]
        try:
            return self._policy.place(request)
        finally:
            fleet.up = up


AFFINE: Mapping[str, Callable[[Fleet], Rival]] = {
    "consistent hash": ConsistentHash,
    "prefix hash": PrefixHash,
    "cache-aware tree": CacheAware,
    "sticky least loaded": StickyLeastLoaded,
}
"""The rivals that use more than loads; unmodified, they keep no bound, or a different one."""
BOUNDED = ", bounded"
RIVALS: Mapping[str, Callable[[Fleet], Any]] = {
    "ours": Ours,
    "ours, session first": lambda fleet: Ours(fleet, ["session", "prefix-aware", "requests"]),
    "least loaded": Rival,
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    **AFFINE,
    **{name + BOUNDED: partial(Bounded, make=make) for name, make in AFFINE.items()},
    "TorchRL": TorchRL,
    "oracle": Oracle,
}
