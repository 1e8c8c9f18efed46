"""Strategies: least loaded with ties to the least recently chosen, round-robin over whoever may serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from torchrl_moe.modules.serving.roster import Roster, RosterEntry
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.modules.serving.strategies import (
    STRATEGIES,
    LeastRequests,
    RoundRobin,
    RoutingContext,
    Strategy,
    make_strategy,
)

CONTEXT = RoutingContext()


def roster_of(*inflight: int) -> Roster:
    roster = Roster(range(len(inflight)), ReplicaState.SERVING)
    for entry, count in zip(roster, inflight, strict=True):
        entry.inflight = count
    return roster


def choices(strategy: Strategy, roster: Roster, allowed: Sequence[Sequence[int]], hold: bool = False) -> list[int]:
    """Choose among each of ``allowed`` in turn; unless ``hold``, a request is over before the next one comes."""
    chosen = []
    for indices in allowed:
        index = strategy.choose([roster[i] for i in indices], CONTEXT)
        assert index is not None
        roster.reserve(index)
        if not hold:
            roster.give_back(index)
        chosen.append(index)
    return chosen


def test_the_least_loaded_is_chosen_wherever_it_stands() -> None:
    roster = roster_of(3, 1, 2)
    assert LeastRequests().choose(list(roster), CONTEXT) == 1
    assert LeastRequests().choose(list(roster)[::-1], CONTEXT) == 1
    assert LeastRequests().choose([roster[0], roster[2]], CONTEXT) == 2


def test_held_requests_level_the_load() -> None:
    # 3,1,2 -> fill 1, then 1 and 2 (1 was chosen last), then all are at 3 and take turns
    assert choices(LeastRequests(), roster_of(3, 1, 2), [[0, 1, 2]] * 6, hold=True) == [1, 2, 1, 0, 2, 1]


def test_200_short_requests_fan_out_evenly_over_4_idle_replicas() -> None:
    chosen = choices(LeastRequests(), roster_of(0, 0, 0, 0), [range(4)] * 200)
    assert Counter(chosen) == {0: 50, 1: 50, 2: 50, 3: 50}
    assert chosen[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_tie_goes_to_the_least_recently_chosen_while_candidates_come_and_go() -> None:
    every, without_0, without_1 = [0, 1, 2], [1, 2], [0, 2]
    allowed = [every, every, without_0, without_0, without_1, every, every, every, without_1, every]
    # last chosen:      0      1        2          1          0      2      1      0      2      1
    assert choices(LeastRequests(), roster_of(0, 0, 0), allowed) == [0, 1, 2, 1, 0, 2, 1, 0, 2, 1]


def test_a_replica_that_was_away_is_not_flooded_on_return() -> None:
    roster = roster_of(0, 0)
    assert choices(LeastRequests(), roster, [[1]] * 5) == [1] * 5
    assert choices(LeastRequests(), roster, [[0, 1]] * 6) == [0, 1, 0, 1, 0, 1]


def test_round_robin_takes_turns_by_index_and_ignores_load() -> None:
    assert choices(RoundRobin(), roster_of(9, 0, 0), [[0, 1, 2]] * 7) == [0, 1, 2, 0, 1, 2, 0]
    assert choices(RoundRobin(), roster_of(0, 0, 0), [[2, 0, 1]] * 4) == [0, 1, 2, 0]


def test_round_robin_skips_whoever_is_away_and_keeps_its_turn() -> None:
    allowed = [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1]]
    # turn:        0             1          3          4 -> 0      1             2          3 -> 1
    assert choices(RoundRobin(), roster_of(0, 0, 0, 0), allowed) == [0, 2, 3, 0, 1, 2, 1]


def test_one_replica_takes_everything() -> None:
    for name in STRATEGIES:
        assert choices(make_strategy(name), roster_of(0), [[0]] * 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("requests", LeastRequests),
        ("least-loaded", LeastRequests),
        ("least_loaded", LeastRequests),
        ("round-robin", RoundRobin),
        ("round_robin", RoundRobin),
    ],
)
def test_a_name_with_hyphens_or_underscores_makes_a_strategy_of_its_own(name: str, kind: type) -> None:
    made = make_strategy(name)
    assert type(made) is kind
    assert made is not make_strategy(name)  # a turn is not shared between balancers


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'fastest'; valid strategies: least-loaded, requests, round"):
        make_strategy("fastest")


def test_an_object_is_taken_as_it_is() -> None:
    class Last:
        name = "last"

        def choose(self, candidates: Sequence[RosterEntry], context: RoutingContext) -> int:
            return candidates[-1].index

    mine = Last()
    assert make_strategy(mine) is mine


class Nameless:
    def choose(self, candidates: Sequence[RosterEntry], context: RoutingContext) -> None:
        return None


@pytest.mark.parametrize("wrong", [None, 3, object(), Nameless(), RoundRobin], ids=repr)
def test_something_else_is_refused(wrong: object) -> None:
    with pytest.raises(
        TypeError, match=r"a strategy is a name \(least-loaded, .*\) or an object with a name and choose"
    ):
        make_strategy(wrong)  # type: ignore[arg-type]


def test_a_context_is_empty_by_default() -> None:
    assert (CONTEXT.prompt, CONTEXT.session_id, dict(CONTEXT.request_context)) == (None, None, {})
