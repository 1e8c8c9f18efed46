"""Which state may follow which: all 36 pairs, written out again by hand."""

from __future__ import annotations

import pytest

from torchrl_moe.modules.serving.candidates import TRANSITIONS, ReplicaState, check_transition

# from (row) to (column): x may, . may not
TABLE = """
             STARTING  SERVING  DRAINING  SYNCING  QUARANTINED  DEAD
STARTING     .         x        .         .        x            x
SERVING      .         .        x         x        x            x
DRAINING     .         x        .         x        x            x
SYNCING      .         x        .         .        x            x
QUARANTINED  x         .        .         .        .            x
DEAD         x         .        .         .        .            .
"""


def pairs() -> list[tuple[str, str, bool]]:
    header, *rows = (line.split() for line in TABLE.strip().splitlines())
    return [(row[0], new, cell == "x") for row in rows for new, cell in zip(header, row[1:], strict=True)]


def test_the_table_has_every_pair_of_states() -> None:
    names = {state.name for state in ReplicaState}
    assert {(old, new) for old, new, _ in pairs()} == {(old, new) for old in names for new in names}
    assert len(pairs()) == 36
    assert set(TRANSITIONS) == set(ReplicaState)


@pytest.mark.parametrize(("old", "new", "allowed"), pairs())
def test_only_the_drawn_transitions_are_allowed(old: str, new: str, allowed: bool) -> None:
    if allowed:
        check_transition(ReplicaState[old], ReplicaState[new])
        return
    with pytest.raises(ValueError, match=f"^a replica that is {old} cannot become {new}; allowed: "):
        check_transition(ReplicaState[old], ReplicaState[new])


def test_a_refusal_lists_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"allowed: DEAD, DRAINING, QUARANTINED, SYNCING$"):
        check_transition(ReplicaState.SERVING, ReplicaState.STARTING)


def test_a_quarantined_replica_serves_again_only_through_a_restart() -> None:
    ways = {new for old, new, allowed in pairs() if allowed and old == "QUARANTINED"}
    assert ways == {"STARTING", "DEAD"}


def test_a_state_prints_as_its_name() -> None:
    assert repr(ReplicaState.SYNCING) == "SYNCING"
