"""Which replica takes a request now, and which one it can wait for."""

from __future__ import annotations

from torchrl_moe.modules.serving.candidates import Recovery, TableEntry
from torchrl_moe.modules.serving.in_flight import InFlight
from torchrl_moe.modules.serving.lease import Lease
from torchrl_moe.modules.serving.states import GONE, ReplicaState

__all__ = ["GROUP", "Needs", "may_wait_for", "needs", "prospect", "take_lease", "takes"]

Needs = tuple[object, ...]
"""What requests have in common so that a replica that takes one of them takes all."""

GROUP = -1
"""Stands for waiting for the outcome of other requests of the group, instead of for a replica."""


def needs(request: InFlight) -> Needs:
    """Return what a request needs from its replica."""
    call, where = request.call, request.placement
    priority = request.request.priority  # an urgent request does not wait behind another one
    return id(call.balancer), where.actor_index, where.min_version, where.group_id, priority, call.timeout is None


def take_lease(request: InFlight, alone_at: int | None = None) -> Lease:
    """Take a lease for a request; on the replica ``alone_at``, if that is reserved for it.

    Raises:
        NoReplicaError: no replica serves.
        StaleReplicaError: none holds the version asked for.
        IndexError: there is no replica of the index that the call names.
    """
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
    serves = entry.state is ReplicaState.SERVING and not entry.breaker.barred
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
        return entry.breaker.barred or entry.reserved
    if entry.state in GONE:
        return entry.recovery is Recovery.SUPERVISOR
    # the awaited update may come from the very thread that waits for this request
    return entry.recovery is not Recovery.UPDATE or has_deadline
