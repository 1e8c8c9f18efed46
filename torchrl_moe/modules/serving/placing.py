"""Which replica takes a request now, and whether it is worth waiting for one that may."""

from __future__ import annotations

from torchrl_moe.modules.serving.candidates import Recovery, TableEntry
from torchrl_moe.modules.serving.in_flight import InFlight
from torchrl_moe.modules.serving.lease import Lease
from torchrl_moe.modules.serving.states import GONE, ReplicaState

__all__ = ["Needs", "may_wait", "needs", "take_lease"]

Needs = tuple[object, ...]
"""What requests must have in common so that a replica that takes one of them takes them all."""


def needs(request: InFlight) -> Needs:
    """Return what a request needs of its replica."""
    call, where = request.call, request.placement
    priority = request.request.priority  # an urgent request does not wait for the turn of another
    return id(call.balancer), where.actor_index, where.min_version, where.group_id, priority, call.timeout is None


def take_lease(request: InFlight) -> Lease:
    """Take a lease for a request.

    Raises:
        NoReplicaError: no replica serves.
        StaleReplicaError: none holds the version asked for.
        IndexError: there is no replica of the index that the call names.
    """
    balancer, where, asked = request.call.balancer, request.placement, request.request
    prompt = asked.prompt if asked.prompt_token_ids is None else asked.prompt_token_ids
    if where.actor_index is not None:
        return balancer.acquire_at(where.actor_index, where.min_version, prompt, where.session_id, where.group_id)
    return balancer.acquire(prompt, where.session_id, where.min_version, where.request_context, where.group_id)


def may_wait(request: InFlight) -> bool:
    """Whether some replica may come to take a request that none takes now. The caller holds the table's lock."""
    balancer, where = request.call.balancer, request.placement
    version = None
    if where.group_id is not None:
        if balancer.groups.may_begin_again(where.group_id):
            return True
        version = balancer.groups.version(where.group_id)
    table, named = balancer.replica_table, where.actor_index
    entries = list(table) if named is None else [table[named]]
    if version is not None:
        # one that is restarted or updated comes with the latest; one that drains keeps what it has
        entries = [entry for entry in entries if version in (entry.version, table.latest_version)]
    return any(_comes(entry, request.call.timeout is not None) for entry in entries)


def _comes(entry: TableEntry, has_deadline: bool) -> bool:
    if entry.state is ReplicaState.SERVING:
        return entry.breaker.barred
    if entry.state in GONE:
        return entry.recovery is Recovery.SUPERVISOR
    # the update that it waits for may have to come from the very thread that waits for this request
    return entry.recovery is not Recovery.UPDATE or has_deadline
