"""The hierarchy: names and objects, the first opinion, one that fails, those that learn."""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from support.strategies import Says
from torchrl_moe.modules.serving.candidates import Candidates, TableEntry
from torchrl_moe.modules.serving.strategies import (
    STRATEGIES,
    Hierarchy,
    KVCache,
    LeastRequests,
    PowerOfTwo,
    PrefixAware,
    RoundRobin,
    RoutingContext,
    SessionAffinity,
    Settings,
    make_strategy,
)

CONTEXT = RoutingContext()


def fails() -> None:
    raise ZeroDivisionError("mine")


def candidates(*inflight: int) -> Candidates:
    return Candidates([TableEntry(i, None, inflight=count, cache=i) for i, count in enumerate(inflight)])


def chosen(hierarchy: Hierarchy, *inflight: int) -> int:
    return hierarchy.choose(candidates(*inflight), CONTEXT).index


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prefix-aware", PrefixAware),
        ("prefix_aware", PrefixAware),
        ("session", SessionAffinity),
        ("requests", LeastRequests),
        ("least-loaded", LeastRequests),
        ("least_loaded", LeastRequests),
        ("kv-cache", KVCache),
        ("kv_cache", KVCache),
        ("power-of-two", PowerOfTwo),
        ("power_of_two", PowerOfTwo),
        ("round-robin", RoundRobin),
        ("round_robin", RoundRobin),
    ],
)
def test_a_name_with_hyphens_or_underscores_makes_a_strategy_of_its_own(name: str, kind: type) -> None:
    made = make_strategy(name)
    assert type(made) is kind
    assert made is not make_strategy(name)  # a turn is not shared between balancers


def test_settings_reach_the_strategies_that_have_them() -> None:
    clock = lambda: 5.0  # noqa: E731
    settings = Settings(prefix_length=16, overload_threshold=2.0, clock=clock, rng=random.Random(0))
    prefix, session = make_strategy("prefix-aware", settings), make_strategy("session", settings)
    assert isinstance(prefix, PrefixAware)
    assert isinstance(session, SessionAffinity)
    assert (prefix.prefix_length, prefix.overload_threshold, session.overload_threshold) == (16, 2.0, 2.0)
    fleet = candidates(*[0] * 50)
    again = make_strategy("power-of-two", Settings(rng=random.Random(0)))
    draws = [make_strategy("power-of-two", settings).choose(fleet, CONTEXT) for _ in range(5)]
    assert draws == [again.choose(fleet, CONTEXT) for _ in range(5)]


@pytest.mark.parametrize(
    ("field", "value"), [("prefix_length", 0), ("overload_threshold", 0.9), ("overload_threshold", float("nan"))]
)
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .* of at least 1"):
        Settings(**{field: value})  # type: ignore[arg-type]


def test_an_unknown_name_lists_the_valid_ones() -> None:
    valid = "kv-cache, least-loaded, power-of-two, prefix-aware, requests, round-robin, session"
    with pytest.raises(ValueError, match=f"unknown strategy 'fastest'; valid strategies: {valid}"):
        make_strategy("fastest")
    with pytest.raises(ValueError, match=f"strategy is empty: name at least one.*valid strategies: {valid}"):
        Hierarchy([], Settings())


def test_an_object_is_taken_as_it_is() -> None:
    mine = Says(lambda: 1)
    assert make_strategy(mine) is mine
    assert Hierarchy(mine, Settings()).strategies == [mine]


class Nameless:
    def choose(self, candidates: Candidates, context: RoutingContext) -> None:
        return None


@pytest.mark.parametrize("wrong", [None, 3, object(), Nameless(), RoundRobin], ids=lambda value: type(value).__name__)
def test_something_else_is_refused(wrong: object) -> None:
    with pytest.raises(
        TypeError, match=r"a strategy is a name \(kv-cache, .*\) or an object of a class derived from Strategy"
    ):
        make_strategy(wrong)  # type: ignore[arg-type]


def test_one_replica_takes_everything_by_every_name() -> None:
    for name in STRATEGIES:
        assert chosen(Hierarchy(name, Settings()), 3) == 0


# -- opinions ---------------------------------------------------------------------------------------------------------


def test_the_first_opinion_wins_and_0_is_one() -> None:
    assert chosen(Hierarchy([Says(lambda: None), Says(lambda: 0), Says(lambda: 2)], Settings()), 5, 0, 0) == 0


def test_without_any_opinion_the_least_loaded_is_taken() -> None:
    assert chosen(Hierarchy([Says(lambda: None), Says(lambda: None)], Settings()), 5, 3, 4) == 1


def test_one_that_fails_falls_to_the_next_with_one_warning() -> None:
    hierarchy = Hierarchy([Says(fails, "broken"), Says(lambda: 2)], Settings())
    with pytest.warns(
        UserWarning, match=r"strategy 'broken' failed with ZeroDivisionError\('mine'\); the next"
    ) as seen:
        assert [chosen(hierarchy, 0, 0, 0) for _ in range(50)] == [2] * 50
    assert len(seen) == 1


@pytest.mark.parametrize("answer", [3, -1, "a", [0]], ids=repr)
def test_an_answer_that_is_no_candidate_falls_to_the_next_with_one_warning(answer: Any) -> None:
    hierarchy = Hierarchy([Says(lambda: answer, "lost"), "requests"], Settings())
    with pytest.warns(UserWarning, match="strategy 'lost'") as seen:
        assert [chosen(hierarchy, 1, 0, 1) for _ in range(3)] == [1, 1, 1]
    assert len(seen) == 1


def test_two_that_fail_are_both_named() -> None:
    hierarchy = Hierarchy([Says(fails, "first"), Says(fails, "second")], Settings())
    with pytest.warns(UserWarning) as seen:
        assert chosen(hierarchy, 1, 0) == 1
    assert [str(warning.message).split("'")[1] for warning in seen] == ["first", "second"]


def test_a_keyboard_interrupt_is_no_failure() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chosen(Hierarchy([Says(interrupted), "requests"], Settings()), 0)


# -- learning ---------------------------------------------------------------------------------------------------------


def test_strategies_that_learn_see_every_placement_of_any_strategy() -> None:
    first, second = Says(lambda: 1), Says(lambda: 0)
    hierarchy = Hierarchy([first, "requests", second], Settings())
    hierarchy.placed(candidates(0, 0)[1], CONTEXT)
    assert (first.learnt, second.learnt) == ([1], [1])


def test_one_that_fails_to_learn_does_not_keep_others_from_it() -> None:
    class Forgetful(Says):
        def placed(self, entry: TableEntry, context: RoutingContext) -> None:
            raise KeyError("full")

    good = Says(lambda: 0)
    hierarchy = Hierarchy([Forgetful(lambda: 0, "forgetful"), good], Settings())
    with pytest.warns(UserWarning, match=r"strategy 'forgetful' failed to learn with KeyError\('full'\)"):
        hierarchy.placed(candidates(0)[0], CONTEXT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hierarchy.placed(candidates(0)[0], CONTEXT)
    assert good.learnt == [0, 0]


def test_stats_are_read_only_for_who_looks_at_them() -> None:
    assert not Hierarchy(["prefix-aware", "requests"], Settings()).reads_stats
    assert Hierarchy(["prefix-aware", "kv-cache"], Settings()).reads_stats


# -- the page ---------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[4] / "docs" / "service.md").read_text()


def test_the_page_has_every_strategy_in_its_table() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    assert STRATEGIES.keys() <= {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
