"""Requests in flight: what the service keeps of each, from its call to its outcome.

.. code-block:: text

    call ---> admission ---> a replica is chosen ---> in flight ---> answer
              waits for a      |            ^         holds a lease
              place            | none       |              |
                ^              v            |              | the replica died
                |            unplaced       |              v
                +--- waits for a change     +------- tries again, perhaps
                     of the replica table            alone: see ``Suspects``

An abort, or a call that ends early (deadline, Ctrl-C), takes a waiting request out at once; a request in flight ends
with the tokens that its engine returns for it.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchrl_moe.errors import EngineError, GenerationTimeout, NoReplicaError, ReplicaDiedError, StaleReplicaError
from torchrl_moe.modules.backends.replica import Completion, Replica, Request, joined
from torchrl_moe.modules.serving.balancer import Lease, LoadBalancer
from torchrl_moe.modules.serving.replica_table import GONE, Recovery, ReplicaState, ReplicaTable, TableEntry
from torchrl_moe.modules.serving.requests import Placement, whole


@dataclass(slots=True, eq=False)
class InFlight:
    """One request of a call, and where it is."""

    call: Call
    position: int
    request: Request
    placement: Placement
    turn: tuple[float, int] | None = None  # in the queue for a place; the lowest is next
    has_place: bool = False
    is_first: bool = False  # of the unplaced requests with the same needs: it is tried for all
    lease: Lease | None = None  # on the replica that runs it
    refusal: EngineError | None = None  # why no replica took it, the last time
    death: ReplicaDiedError | None = None  # of the replica that had it last
    deaths: int = 0
    met_dead: bool = False  # its replica had died before it was sent there
    number: int = 0  # of the requests that its replica has had
    aborted: bool = False  # by the user, or because its call ends early
    dropped: bool = False  # its call ended early, and waits only briefly for what it has
    outcome: Completion | None = None
    error: BaseException | None = None
    task: asyncio.Task[None] | None = None  # that serves it, from its first place on
    parts: list[Completion] = field(default_factory=list)  # of one that streams, which its caller has
    _pause: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait, in its task, for :meth:`go_on`."""
        self._pause = asyncio.get_running_loop().create_future()
        await self._pause

    def go_on(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    @property
    def is_over(self) -> bool:
        """Whether its call no longer waits for it."""
        return self.outcome is not None or self.error is not None

    def not_placed(self) -> EngineError:
        """Return the error for a request that no replica takes: the reason, and an earlier death of its replica."""
        why, death, named = self.refusal, self.death, self.placement.actor_index
        assert why is not None
        table = self.call.balancer.replica_table
        if named is not None and table[named].state is ReplicaState.DEAD:
            words = death or table[named].last_error or "its process is gone"
            return ReplicaDiedError(f"replica {named}, which actor_index names, is dead: {words}")
        text = str(why) if death is None else f"{why}. It had started on another replica: {death}"
        return StaleReplicaError(text) if isinstance(why, StaleReplicaError) else NoReplicaError(text)


class Call:
    """The requests of one ``generate``, which end together."""

    def __init__(
        self,
        balancer: LoadBalancer,
        requests: Sequence[Request],
        placements: Sequence[Placement],
        timeout: float | None = None,
    ) -> None:
        self.balancer = balancer
        self.timeout = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.requests: list[InFlight] = []
        self.whole: list[Completion] = []  # that were complete when they came
        for position, (request, placement) in enumerate(zip(requests, placements, strict=True)):
            outcome = whole(request)
            self.requests.append(InFlight(self, position, request, placement, outcome=outcome))
            if outcome is not None:
                self.whole.append(outcome)
        self.unfinished = len(self.requests) - len(self.whole)
        self.finished: Callable[[Completion], object] = lambda _: None
        self.has_begun = False
        self.is_late = False
        self.error: BaseException | None = None  # of the call as a whole
        self.timer: asyncio.TimerHandle | None = None
        self.over = False
        self.on_over: Callable[[], object] = lambda: None
        self.on_part: Callable[[Completion], object] = lambda _: None

    def end(self) -> None:
        """Release the caller with the current results, once."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.over:
            self.over, self.timer = True, None
            self.on_over()

    def partial(self) -> list[Completion]:
        """Return the outcomes in input order; an aborted request has its tokens so far, one that never started none."""
        return [joined(one.request, one.parts) if one.outcome is None else one.outcome for one in self.requests]

    def result(self) -> list[Completion]:
        error = self.error
        outcomes: list[Completion] = []
        for request in self.requests:
            if error is None:
                error = request.error
            if request.outcome is not None:
                outcomes.append(request.outcome)
        if error is None and self.is_late:
            error = self._lateness()
        if isinstance(error, EngineError):
            error.partial = list(self.partial())
        # they refer to the call; a reference cycle would keep the answers until the next garbage collection
        self.requests = []
        if error is not None:
            raise error
        return outcomes

    def _lateness(self) -> EngineError | None:
        """Return the error of a call at its deadline; ``None`` if all requests had finished."""
        late = [one for one in self.requests if one.dropped and (one.outcome is None or one.outcome.aborted)]
        if not late:
            return None
        if (unplaced := next((request for request in late if request.refusal is not None), None)) is not None:
            return unplaced.not_placed()
        what = (
            f"{len(late)} of {len(self.requests)} requests were not finished within {self.timeout:g} s and were aborted"
        )
        if late[0].request.scoring is not None:
            return GenerationTimeout(f"{what}. Raise timeout_seconds, or score fewer tokens at once.")
        return GenerationTimeout(
            f"{what}; finished and partial answers are in .partial. Raise timeout_seconds, "
            "lower max_tokens, or continue with generate(resume=error.partial)."
        )


# Which replica takes a request now, and which one it can wait for.


Needs = tuple[object, ...]
"""What requests have in common so that a replica that takes one of them takes all."""

GROUP = -1
"""Stands for waiting for the outcome of other requests of the group, instead of for a replica."""


def needs(request: InFlight) -> Needs:
    call, where = request.call, request.placement
    priority = request.request.priority  # an urgent request does not wait behind another one
    return id(call.balancer), where.actor_index, where.min_version, where.group_id, priority, call.timeout is None


def take_lease(request: InFlight, alone_at: int | None = None) -> Lease:
    """Take a lease for a request; on the replica ``alone_at``, if that is reserved for it."""
    balancer, where, asked = request.call.balancer, request.placement, request.request
    prompt = asked.prompt if asked.prompt_token_ids is None else asked.prompt_token_ids
    at = where.min_version, prompt, where.session_id, where.group_id
    if alone_at is not None:
        return balancer.acquire_at(alone_at, *at, alone=True)
    if where.actor_index is not None:
        return balancer.acquire_at(where.actor_index, *at)
    return balancer.acquire(prompt, where.session_id, where.min_version, where.request_context, where.group_id)


def takes(request: InFlight, version: int) -> bool:
    """Whether a request may go to a replica of a version. The caller holds the table's lock."""
    least, pinned = request.placement.min_version, _pinned(request)
    return (least is None or version >= least) and pinned in (None, version)


def prospect(request: InFlight) -> int | None:
    """Return the index of a replica that may later take a request that none takes now, or :data:`GROUP`.

    ``None`` if it would wait in vain. The caller holds the table's lock.
    """
    balancer, where = request.call.balancer, request.placement
    if where.group_id is not None and balancer.groups.may_begin_again(where.group_id):
        return GROUP
    table, named = balancer.replica_table, where.actor_index
    for entry in table if named is None else (table[named],):
        if _suits(request, entry) and _comes(entry, request.call.timeout is not None):
            return entry.index
    return None


def may_wait_for(request: InFlight, entry: TableEntry) -> bool:
    """Whether a replica takes a request, now or later, once it is idle. The caller holds the table's lock."""
    if request.placement.actor_index not in (None, entry.index) or entry.leaving or not _suits(request, entry):
        return False
    serves = entry.state is ReplicaState.SERVING and not entry.breaker.blocks
    return serves or _comes(entry, request.call.timeout is not None)


def _suits(request: InFlight, entry: TableEntry) -> bool:
    # one that is restarted or updated gets the latest version; one that drains keeps its version
    table, version = request.call.balancer.replica_table, _pinned(request)
    return version in (None, entry.version, table.latest_version)


def _pinned(request: InFlight) -> int | None:
    """Return the version that a request's group is on, if it has one."""
    group = request.placement.group_id
    return None if group is None else request.call.balancer.groups.version(group)


def _comes(entry: TableEntry, has_deadline: bool) -> bool:
    if entry.leaving:
        return False
    if entry.state is ReplicaState.SERVING:
        return entry.breaker.blocks or entry.reserved
    if entry.state in GONE:
        return entry.recovery is Recovery.SUPERVISOR
    # the awaited update may come from the very thread that waits for this request
    return entry.recovery is not Recovery.UPDATE or has_deadline


# Unplaced requests, which no replica took, and which of them a change affects.
#
# Requests with the same needs are of one kind: the first of them is tried for all. What each kind waits for is
# recorded, so that a change of one replica does not retry a thousand kinds.


@dataclass(slots=True)
class _Kind:
    waits_for: int  # see :func:`prospect`
    requests: OrderedDict[InFlight, None] = field(default_factory=OrderedDict)  # in order of arrival

    @property
    def first(self) -> InFlight:
        return next(iter(self.requests))

    def join(self, request: InFlight) -> None:
        request.refusal = self.first.refusal
        self.requests[request] = None


class Unplaced:
    """Requests that wait for a replica. Used only in the thread of the service's loop."""

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table
        self.kinds: dict[Needs, _Kind] = {}
        self._groups: dict[str, dict[Needs, None]] = {}  # the kinds of each group
        self._settled: set[str] = set()  # since the last call; other threads add, under the table's lock
        self._seen = 0  # changes of the table, at the last call

    def __len__(self) -> int:
        return sum(len(kind.requests) for kind in self.kinds.values())

    def kind_of(self, request: InFlight) -> _Kind | None:
        """Return those that have the needs of a request; ``None``: there are none."""
        return self.kinds.get(needs(request))

    def put_first(self, request: InFlight, waits_for: int) -> None:
        """Keep a request that was tried, ahead of others with its needs. The caller holds the table's lock."""
        if not self.kinds:
            self._seen = self._table.changes
        key = needs(request)
        kind = self.kinds.setdefault(key, _Kind(waits_for))
        if (group := request.placement.group_id) is not None:
            self._groups.setdefault(group, {})[key] = None
        kind.waits_for = waits_for
        kind.requests[request] = None
        kind.requests.move_to_end(request, last=False)

    def remove(self, request: InFlight) -> bool:
        key = needs(request)
        kind = self.kinds.get(key)
        if kind is None or request not in kind.requests:
            return False
        del kind.requests[request]
        if not kind.requests:
            del self.kinds[key]
            if (group := request.placement.group_id) is not None:
                del self._groups[group][key]
                if not self._groups[group]:
                    del self._groups[group]
        return True

    def settle(self, group: str) -> None:
        """Note that a group's outcome is settled, for others of the group. The caller holds the table's lock."""
        if group in self._groups:
            self._settled.add(group)

    def affected(self) -> list[InFlight]:
        """Return, in order of arrival, the first request of each kind that a change affected since the last call."""
        firsts: dict[InFlight, None] = {}
        with self._table.lock:
            for group in self._settled:
                firsts |= {self.kinds[key].first: None for key in self._groups.get(group, ())}
            self._settled.clear()
            changed = [] if self._seen == self._table.changes else self._table.changed_since(self._seen)
            self._seen = self._table.changes
            indices = {entry.index for entry in changed}
            versions = {entry.version for entry in changed if entry.may_take}
            for kind in self.kinds.values() if changed else ():
                first, named = kind.first, kind.first.placement.actor_index
                # it names a changed replica; else it waits for one, or one that serves now has its version
                if named in indices or (
                    named is None and (kind.waits_for in indices or any(takes(first, version) for version in versions))
                ):
                    firsts[first] = None
        return sorted(firsts, key=lambda request: request.turn or (0.0, 0))


# Requests under which a replica died, while it is not known whether one of them killed it.
#
# A request that kills does so when it arrives. So those that were sent last to a replica that died are tried again
# one by one, last first, on a replica that runs nothing else: then a second death is its own, and nobody else's.
# After a second the next may join it, since most deaths are accidents, and answers may take minutes. The others go on
# at once, like new ones. All that a second replica dies under are tried here, each alone to its end.


LAST_SENT = 8
"""How many of the requests that were sent last to a replica are suspected of its death."""
ALONE_SECONDS = 1.0
"""How long one is tried before the next joins it, the first time."""


class Suspects:
    """Requests that wait to be tried alone. Used only in the thread of the service's loop."""

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table
        self._sent: weakref.WeakKeyDictionary[Replica, int] = weakref.WeakKeyDictionary()  # replica -> requests so far
        self.waiting: list[InFlight] = []
        self._place: TableEntry | None = None  # that takes no others
        self._joined: list[InFlight] = []  # that were tried there before, and may still run
        self.tried: InFlight | None = None
        self.is_alone = False

    def sent(self, request: InFlight) -> None:
        """Number a request that goes to the replica of its lease."""
        assert request.lease is not None
        request.met_dead = request.lease.replica.death is not None
        self._sent[request.lease.replica] = request.number = self._sent.get(request.lease.replica, 0) + 1

    def add(self, request: InFlight, replica: Replica) -> bool:
        """Take in a request whose replica died; return false if it need not be alone yet."""
        if request.deaths == 1 and request.number <= self._sent.get(replica, 0) - LAST_SENT:
            return False
        self.waiting.append(request)
        self.waiting.sort(key=lambda one: -one.number)
        return True

    def remove(self, request: InFlight) -> bool:
        if request not in self.waiting:
            return False
        self.waiting.remove(request)
        self._free()
        return True

    def next(self) -> InFlight | None:
        """Return the next request to try, with a lease on an idle replica; ``None`` while it waits for one.

        If it has no lease, it would wait in vain: the usual way says why.
        """
        if self.tried is not None or not self.waiting:
            return None
        request = self.waiting[0]
        with self._table.lock:
            place = self._reserved_for(request)
            if place is not None and (place.state is not ReplicaState.SERVING or place.breaker.blocks):
                request.refusal = NoReplicaError(f"no replica is serving: {self._table!r}")
                return None  # the table tells when it is there
            request.refusal = None
            beside = self._beside() if request.deaths == 1 else []
            if place is not None and place.inflight > len(beside):
                return None  # and when it is idle
            self.waiting.pop(0)
            if place is not None:
                try:
                    request.lease, self.tried = take_lease(request, alone_at=place.index), request
                    self.is_alone = not beside
                except (NoReplicaError, StaleReplicaError) as why:
                    request.refusal = why
            self._free()
        return request

    def ended(self, request: InFlight, killed: bool = False) -> list[InFlight]:
        """Note that a request is over, or that the next may join it; return those that need not be alone any more."""
        if request is not self.tried:
            return []
        cleared: list[InFlight] = []
        if killed and self.is_alone:
            cleared, self.waiting = self.waiting, []
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
            self._unreserve()
        fitting = [entry for entry in self._table if may_wait_for(request, entry)]
        if self._place is None and fitting:
            # one that is idle; else one that is about to come, and then is; else the one that soon may be
            self._place = min(fitting, key=lambda entry: (entry.inflight, entry.state is not ReplicaState.SERVING))
            self._table.set_reserved(self._place.index, True)
        return self._place

    def _free(self) -> None:
        if self.tried is None and not self.waiting:
            self._unreserve()

    def _unreserve(self) -> None:
        if self._place is not None:
            place, self._place = self._place, None
            self._table.set_reserved(place.index, False)
