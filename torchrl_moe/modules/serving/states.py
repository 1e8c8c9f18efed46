"""The states of a replica, and the allowed transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

__all__ = ["GONE", "TRANSITIONS", "ReplicaState", "check_transition"]


class ReplicaState(Enum):
    """What a replica may be used for. Only SERVING takes new requests."""

    STARTING = "starting"  # its engine, or the weights it must hold, are still loading
    SERVING = "serving"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    SYNCING = "syncing"  # its weights are being replaced
    QUARANTINED = "quarantined"  # its weights are unknown: waits for a restart
    DEAD = "dead"  # its process is gone

    def __repr__(self) -> str:
        return self.name


GONE = frozenset({ReplicaState.DEAD, ReplicaState.QUARANTINED})
"""States that only a restart ends."""

_S = ReplicaState

# A replica whose update failed half-way is never put back to SERVING: it restarts, and starts again.
TRANSITIONS: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    _S.STARTING: frozenset({_S.SERVING, _S.QUARANTINED, _S.DEAD}),
    _S.SERVING: frozenset({_S.DRAINING, _S.SYNCING, _S.QUARANTINED, _S.DEAD}),
    _S.DRAINING: frozenset({_S.SERVING, _S.SYNCING, _S.QUARANTINED, _S.DEAD}),
    _S.SYNCING: frozenset({_S.SERVING, _S.QUARANTINED, _S.DEAD}),
    _S.QUARANTINED: frozenset({_S.STARTING, _S.DEAD}),
    _S.DEAD: frozenset({_S.STARTING}),
}


def check_transition(old: ReplicaState, new: ReplicaState) -> None:
    """Raise ``ValueError`` unless ``new`` may follow ``old``.

    >>> check_transition(ReplicaState.SERVING, ReplicaState.SYNCING)
    >>> check_transition(ReplicaState.QUARANTINED, ReplicaState.SERVING)
    Traceback (most recent call last):
    ...
    ValueError: a replica that is QUARANTINED cannot become SERVING; allowed: DEAD, STARTING
    """
    allowed = TRANSITIONS[old]
    if new not in allowed:
        names = ", ".join(sorted(state.name for state in allowed))
        raise ValueError(f"a replica that is {old.name} cannot become {new.name}; allowed: {names}")
