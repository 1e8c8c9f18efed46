"""Where a call's requests may go, who takes them now, and whether it is worth waiting for somebody who may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_moe._errors import EngineError, NoReplicaError, ReplicaDiedError, StaleReplicaError
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.serving.candidates import Recovery, RosterEntry
from torchrl_moe.modules.serving.lease import Lease
from torchrl_moe.modules.serving.load_balancer import LoadBalancer
from torchrl_moe.modules.serving.states import GONE, ReplicaState

__all__ = ["Placement", "Placer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a call's requests may go: a replica by name, the version they need; and what strategies are told.

    ``session_ids`` and ``group_ids`` hold one name per request.
    """

    actor_index: int | None = None
    session_ids: Sequence[str] | None = None
    min_version: int | None = None
    group_ids: Sequence[str] | None = None
    request_context: Mapping[str, Any] | None = None


class Placer:
    """Takes leases for the requests of one call. The caller holds the roster's lock.

    Args:
        balancer: gives the leases.
        placement: where the requests may go.
        ends: whether the call has a deadline.
    """

    def __init__(self, balancer: LoadBalancer, placement: Placement, ends: bool) -> None:
        self._balancer = balancer
        self._placement = placement
        self._ends = ends

    def lease(self, position: int, request: Request) -> Lease:
        """Take a lease for the request at a position.

        Raises:
            NoReplicaError: no replica serves.
            StaleReplicaError: none holds the version asked for.
        """
        where = self._placement
        prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
        session = None if where.session_ids is None else where.session_ids[position]
        group = None if where.group_ids is None else where.group_ids[position]
        if where.actor_index is not None:
            return self._balancer.acquire_at(where.actor_index, where.min_version, prompt, session, group)
        return self._balancer.acquire(prompt, session, where.min_version, where.request_context, group)

    def may_wait(self, position: int) -> bool:
        """Whether some replica may come to take a request that none takes now."""
        groups, version = self._placement.group_ids, None
        if groups is not None:
            if self._balancer.groups.may_begin_again(groups[position]):
                return True
            version = self._balancer.groups.version(groups[position])
        roster, named = self._balancer.roster, self._placement.actor_index
        entries = list(roster) if named is None else [roster[named]]
        if version is not None:
            # one that is restarted or updated comes with the latest; one that drains keeps what it has
            entries = [entry for entry in entries if version in (entry.version, roster.latest_version)]
        return any(self._comes(entry) for entry in entries)

    def _comes(self, entry: RosterEntry) -> bool:
        if entry.state is ReplicaState.SERVING:
            return entry.breaker.barred
        if entry.state in GONE:
            return entry.recovery is Recovery.SUPERVISOR
        # the update that it waits for may have to come from the very thread that waits here
        return entry.recovery is not Recovery.UPDATE or self._ends

    def error(self, refusal: EngineError, death: ReplicaDiedError | None, partial: Sequence[Any]) -> EngineError:
        """Return what to raise for a request that nobody takes: ``refusal``, with the ``death`` that it met before."""
        text = str(refusal) if death is None else f"{refusal}. It had begun elsewhere: {death}"
        named = self._placement.actor_index
        if named is not None and self._balancer.roster[named].state is ReplicaState.DEAD:
            why = death or self._balancer.roster[named].last_error or "its process is gone"
            return ReplicaDiedError(f"replica {named}, which actor_index names, is dead: {why}", partial)
        if isinstance(refusal, StaleReplicaError):
            return StaleReplicaError(text, partial)
        return NoReplicaError(text, partial)
