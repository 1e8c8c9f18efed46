"""Which replica takes a request now, and which one it is worth waiting for."""

from __future__ import annotations

from torchrl_moe.modules.serving.candidates import Recovery, TableEntry
from torchrl_moe.modules.serving.in_flight import InFlight
from torchrl_moe.modules.serving.lease import Lease
from torchrl_moe.modules.serving.states import GONE, ReplicaState

__all__ = ["GROUP", "Needs", "needs", "prospect", "take_lease", "takes"]

Needs = tuple[object, ...]
"""What requests must have in common so that a replica that takes one of them takes them all."""

GROUP = -1
"""In place of a replica that a request waits for: what becomes of the others of its group."""


def needs(request: InFlight) -> Needs:
    """Return what a request needs of its replica."""
    call, where = request.call, request.call.placement
    priority = request.request.priority  # an urgent request does not wait for the turn of another
    return id(call.balancer), where.actor_index, where.min_version, request.group, priority, call.timeout is None


def take_lease(request: InFlight) -> Lease:
    """Take a lease for a request.

    Raises:
        NoReplicaError: no replica serves.
        StaleReplicaError: none holds the version asked for.
        IndexError: there is no replica of the index that the call names.
    """
    balancer, where, asked = request.call.balancer, request.call.placement, request.request
    prompt = asked.prompt if asked.prompt_token_ids is None else asked.prompt_token_ids
    session, group = where.session(request.position), request.group
    if where.actor_index is not None:
        return balancer.acquire_at(where.actor_index, where.min_version, prompt, session, group)
    return balancer.acquire(prompt, session, where.min_version, where.request_context, group)


def takes(request: InFlight, version: int) -> bool:
    """Whether a request may go to a replica of a version. The caller holds the table's lock."""
    least, pinned = request.call.placement.min_version, _pinned(request)
    return (least is None or version >= least) and pinned in (None, version)


def prospect(request: InFlight) -> int | None:
    """Return the index of a replica that may come to take a request that none takes now, or :data:`GROUP`.

    ``None`` if it would wait in vain. The caller holds the table's lock.
    """
    balancer, named = request.call.balancer, request.call.placement.actor_index
    if request.group is not None and balancer.groups.may_begin_again(request.group):
        return GROUP
    table, version = balancer.replica_table, _pinned(request)
    for entry in table if named is None else (table[named],):
        # one that is restarted or updated comes with the latest; one that drains keeps what it has
        if version in (None, entry.version, table.latest_version) and _comes(entry, request.call.timeout is not None):
            return entry.index
    return None


def _pinned(request: InFlight) -> int | None:
    """Return the version that a request's group is on, if it has one."""
    return None if request.group is None else request.call.balancer.groups.version(request.group)


def _comes(entry: TableEntry, has_deadline: bool) -> bool:
    if entry.state is ReplicaState.SERVING:
        return entry.breaker.barred
    if entry.state in GONE:
        return entry.recovery is Recovery.SUPERVISOR
    # the update that it waits for may have to come from the very thread that waits for this request
    return entry.recovery is not Recovery.UPDATE or has_deadline
