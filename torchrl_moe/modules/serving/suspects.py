"""Requests under which a replica died, while it is not known whether one of them killed it.

A request that kills does so when it arrives. So those that were sent last to a replica that died are tried again one by
one, last first, on a replica that runs nothing else: then a second death is its own, and nobody else's. After a
second the next may join it, since most deaths are accidents, and answers may take minutes. The others go on at once,
like new ones. All that a second replica dies under are tried here, each alone to its end.
"""

from __future__ import annotations

import weakref
from typing import Any

from torchrl_moe._errors import NoReplicaError, StaleReplicaError
from torchrl_moe.modules.serving.in_flight import InFlight
from torchrl_moe.modules.serving.placing import may_wait_for, take_lease
from torchrl_moe.modules.serving.replica_table import ReplicaTable, TableEntry
from torchrl_moe.modules.serving.states import ReplicaState

__all__ = ["LAST_SENT", "Suspects"]

LAST_SENT = 8
"""How many of the requests that were sent last to a replica are suspected of its death."""
ALONE_SECONDS = 1.0
"""How long one is tried before the next joins it, the first time."""


class Suspects:
    """Requests that wait to be tried alone. Used only in the thread of the service's loop.

    Args:
        table: the replicas.

    Attributes:
        tried: the request that is tried now.
        is_alone: whether it has had its replica to itself since it began.
    """

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table
        self._sent: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # replica -> requests so far
        self._waiting: list[InFlight] = []
        self._place: TableEntry | None = None  # that takes no others
        self._joined: list[InFlight] = []  # that were tried there before, and may still run
        self.tried: InFlight | None = None
        self.is_alone = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def sent(self, request: InFlight) -> None:
        """Number a request that goes to the replica of its lease."""
        assert request.lease is not None
        request.met_dead = request.lease.replica.death is not None
        self._sent[request.lease.replica] = request.number = self._sent.get(request.lease.replica, 0) + 1

    def add(self, request: InFlight, replica: Any) -> None:
        """Take in a request whose replica died, unless it need not be alone yet."""
        if request.deaths > 1 or request.number > self._sent.get(replica, 0) - LAST_SENT:
            self._waiting.append(request)
            self._waiting.sort(key=lambda one: -one.number)

    def holds(self, request: InFlight) -> bool:
        """Whether a request waits here."""
        return request in self._waiting

    def remove(self, request: InFlight) -> bool:
        """Remove a request that waits; return whether it did."""
        if request not in self._waiting:
            return False
        self._waiting.remove(request)
        self._free()
        return True

    def next(self) -> InFlight | None:
        """Return the next request to try, with a lease on an idle replica; ``None`` while it waits for one.

        If it has no lease, it would wait in vain: the usual way says why.
        """
        if self.tried is not None or not self._waiting:
            return None
        request = self._waiting[0]
        with self._table.lock:
            place = self._reserved_for(request)
            if place is not None and (place.state is not ReplicaState.SERVING or place.breaker.barred):
                request.refusal = NoReplicaError(f"no replica is serving: {self._table!r}")
                return None  # the table tells when it is there
            request.refusal = None
            beside = self._beside() if request.deaths == 1 else []
            if place is not None and place.inflight > len(beside):
                return None  # and when it is idle
            self._waiting.pop(0)
            if place is not None:
                try:
                    request.lease, self.tried = take_lease(request, alone_at=place.index), request
                    self.is_alone = not beside
                except (NoReplicaError, StaleReplicaError) as why:
                    request.refusal = why
            self._free()
        return request

    def ended(self, request: InFlight, killed: bool = False) -> list[InFlight]:
        """Note that a request is over, or that the next may join it; return those that need not be alone any more.

        Args:
            request: any.
            killed: whether its replica died: if it was alone there, it did that, and the first death is explained.
        """
        if request is not self.tried:
            return []
        cleared: list[InFlight] = []
        if killed and self.is_alone:
            cleared, self._waiting = self._waiting, []
            for one in cleared:
                one.deaths = 0
        self.tried = None
        self._joined.append(request)
        self._beside()
        self._free()
        return cleared

    def _beside(self) -> list[InFlight]:
        """Return those that were tried on the reserved replica before, and still run there."""
        replica = None if self._place is None else self._place.replica
        self._joined = [one for one in self._joined if one.lease is not None and one.lease.replica is replica]
        return self._joined

    def _reserved_for(self, request: InFlight) -> TableEntry | None:
        """Return the replica that the request will have, from which others are kept away; ``None``: there is none."""
        if self._place is not None and not may_wait_for(request, self._place):
            self._let_go()
        fitting = [entry for entry in self._table if may_wait_for(request, entry)]
        if self._place is None and fitting:
            # one that is idle; else one that is about to come, and then is; else the one that soon may be
            self._place = min(fitting, key=lambda entry: (entry.inflight, entry.state is not ReplicaState.SERVING))
            self._table.set_reserved(self._place.index, True)
        return self._place

    def _free(self) -> None:
        if self.tried is None and not self._waiting:
            self._let_go()

    def _let_go(self) -> None:
        if self._place is not None:
            place, self._place = self._place, None
            self._table.set_reserved(place.index, False)
