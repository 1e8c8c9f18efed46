"""Parked requests, which no replica took, and which of them a change affects.

Requests with the same needs are of one kind: the first of them is tried for all. What each kind waits for is recorded,
so that a change of one replica does not retry a thousand kinds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchrl_moe.modules.serving.in_flight import InFlight
from torchrl_moe.modules.serving.placing import Needs, needs, takes
from torchrl_moe.modules.serving.replica_table import ReplicaTable

__all__ = ["Parked"]


@dataclass(slots=True)
class _Kind:
    waits_for: int  # see placing.prospect
    requests: OrderedDict[InFlight, None] = field(default_factory=OrderedDict)  # in order of arrival

    @property
    def first(self) -> InFlight:
        return next(iter(self.requests))


class Parked:
    """Requests that wait for a replica. Used only in the thread of the service's loop.

    Args:
        table: the replicas.
    """

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table
        self._kinds: dict[Needs, _Kind] = {}
        self._groups: dict[str, dict[Needs, None]] = {}  # the kinds of each group
        self._settled: set[str] = set()  # since the last call; other threads add, under the table's lock
        self._seen = 0  # changes of the table, at the last call

    def __len__(self) -> int:
        return sum(len(kind.requests) for kind in self._kinds.values())

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def join(self, request: InFlight) -> bool:
        """Park a request behind others with its needs; return whether there are any."""
        kind = self._kinds.get(needs(request)) if self._kinds else None
        if kind is None:
            return False
        request.refusal = kind.first.refusal
        kind.requests[request] = None
        return True

    def put_first(self, request: InFlight, waits_for: int) -> None:
        """Park a request that was tried, ahead of others with its needs. The caller holds the table's lock."""
        if not self._kinds:
            self._seen = self._table.changes
        key = needs(request)
        kind = self._kinds.setdefault(key, _Kind(waits_for))
        if (group := request.placement.group_id) is not None:
            self._groups.setdefault(group, {})[key] = None
        kind.waits_for = waits_for
        kind.requests[request] = None
        kind.requests.move_to_end(request, last=False)

    def alike(self, request: InFlight) -> list[InFlight]:
        """Return those that have the needs of a request, in order of arrival."""
        kind = self._kinds.get(needs(request)) if self._kinds else None
        return [] if kind is None else list(kind.requests)

    def next_alike(self, request: InFlight) -> list[InFlight]:
        """Return the first of those that have the needs of a request, if there is one."""
        kind = self._kinds.get(needs(request))
        return [] if kind is None else [kind.first]

    def remove(self, request: InFlight) -> bool:
        """Remove a request; return whether it was parked."""
        key = needs(request)
        kind = self._kinds.get(key)
        if kind is None or request not in kind.requests:
            return False
        del kind.requests[request]
        if not kind.requests:
            del self._kinds[key]
            if (group := request.placement.group_id) is not None:
                del self._groups[group][key]
                if not self._groups[group]:
                    del self._groups[group]
        return True

    def settle(self, group: str) -> None:
        """Note that a group's outcome is settled, for others of the group. The caller holds the table's lock."""
        if group in self._groups:
            self._settled.add(group)

    def concerned(self) -> list[InFlight]:
        """Return the first request of each kind that a change affected since the last call, in order of arrival."""
        firsts: dict[InFlight, None] = {}
        with self._table.lock:
            for group in self._settled:
                firsts |= {self._kinds[key].first: None for key in self._groups.get(group, ())}
            self._settled.clear()
            if self._seen != self._table.changes:
                changed = self._table.changed_since(self._seen)
                self._seen = self._table.changes
                versions = {entry.version for entry in changed if entry.may_take}
                firsts |= dict.fromkeys(self._firsts({entry.index for entry in changed}, versions))
        return sorted(firsts, key=lambda request: request.turn or (0.0, 0))

    def _firsts(self, changed: set[int], versions: set[int]) -> Iterator[InFlight]:
        """Yield kinds that wait for a changed replica, or that a replica now serving their version may take."""
        for kind in self._kinds.values():
            first, named = kind.first, kind.first.placement.actor_index
            if named is not None:
                concerned = named in changed
            else:
                concerned = kind.waits_for in changed or any(takes(first, version) for version in versions)
            if concerned:
                yield first
