"""Groups come in their order, none is older than promised, and nothing is lost, whatever happens when."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_moe.collectors.schedule import Schedule


def fill(schedule: Schedule) -> list[int]:
    begun = []
    while schedule.may_begin:
        begun.append(schedule.begin())
    return begun


def test_so_many_groups_begin_as_will_be_used_in_time() -> None:
    assert fill(Schedule(groups_per_batch=4, max_staleness=2)) == list(range(12))
    assert len(fill(Schedule(4, 0, "ready", over_sample=1.5))) == 6
    schedule = Schedule(2, 0)
    schedule.begun = 7  # numbers continue
    assert fill(schedule) == [7, 8]


@pytest.mark.parametrize(
    ("schedule", "happens", "batches"),
    [
        (Schedule(2, 1, "fifo"), "123t0tt", [[], [0, 1], [2, 3]]),  # it waits for the head
        (Schedule(1, 1, "fifo"), "1t0tt", [[], [0], [1]]),
        (Schedule(1, 1, "window", window=0.01), "1t0tt", [[], [0], [1]]),  # W = 1 at least
        # W = 2 of 4 places: first only 0 and 1 are within reach, then 2 is still out of it
        (Schedule(2, 1, "window", window=0.5), "23t1t0t", [[], [], [0, 1]]),
        # W = 2: 2 would overtake the head as the second one
        (Schedule(1, 3, "window", window=0.5), "123tt0tt", [[1], [], [0], [2]]),
        (Schedule(3, 0, "window", window=0.01), "210t", [[0, 1, 2]]),  # W = 1: taking the head moves the window
        (Schedule(2, 1, "ready"), "31t", [[1, 3]]),
    ],
)
def test_what_may_overtake_what(schedule: Schedule, happens: str, batches: list[list[int]]) -> None:
    """A digit: that group is ready; ``t``: a batch is taken."""
    fill(schedule)
    assert schedule.ready_groups == 0
    assert [schedule.take() for one in happens if one == "t" or schedule.ready(int(one))] == batches
    assert schedule.ready_groups == sum(one != "t" for one in happens) - sum(map(len, batches))


@pytest.mark.parametrize("says", [Schedule.trained, Schedule.updated], ids=["asks again", "updates"])
def test_a_batch_makes_room_when_it_has_been_trained_and_a_dropped_group_at_once(says: Any) -> None:
    """A trainer that asks again has trained on it though no weights came."""
    schedule = Schedule(2, 0, "fifo")
    assert fill(schedule) == [0, 1]
    schedule.drop(0)
    assert fill(schedule) == [2]  # at the end of the line
    for batch in ([1, 2], [3, 4], [5, 6]):
        for group in batch:
            schedule.ready(group)
        assert schedule.take() == batch
        assert not schedule.may_begin
        says(schedule)
        assert fill(schedule) == [batch[1] + 1, batch[1] + 2]


@pytest.mark.parametrize("updates", [1, 2, 3, 4])
@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_with_several_updates_a_batch_the_bound_holds_from_the_third_batch_on(staleness: int, updates: int) -> None:
    schedule, version, begun, ages = Schedule(2, staleness, "fifo"), 0, {}, []
    is_ready: set[int] = set()
    for _ in range(30):
        begun |= dict.fromkeys(fill(schedule), version)
        for group in begun.keys() - is_ready:
            schedule.ready(group)
        is_ready |= begun.keys()
        ages.append(max(version - begun[group] for group in schedule.take()))
        for _ in range(updates):
            version += 1
            schedule.updated()
            begun |= dict.fromkeys(fill(schedule), version)
        schedule.trained()
    assert max(ages[staleness + 3 :]) <= staleness


def test_a_burst_of_updates_is_forgotten_and_those_before_the_first_batch_do_not_count() -> None:
    schedule = Schedule(1, 2, "fifo")
    schedule.updated(1000)  # the weights of a restored trainer
    assert len(fill(schedule)) == 3
    in_line = []
    for batch in range(12):
        for group in range(schedule.begun - schedule.in_line, schedule.begun):
            schedule.ready(group)
        schedule.take()
        schedule.updated(3 if batch == 2 else 1)
        schedule.trained()
        fill(schedule)
        in_line.append(schedule.in_line)
    assert in_line == [3, 3, 3, 2, 1, 1, 1, 3, 3, 3, 3, 3]  # S // 3 = 0 batches ahead, for four batches


def test_the_newest_group_may_lag_by_what_its_place_in_line_leaves() -> None:
    schedule = Schedule(2, 2, "fifo")
    slacks = []
    while schedule.may_begin:
        schedule.begin()
        slacks.append(schedule.slack)
    assert slacks == [2, 2, 1, 1, 0, 0]
    schedule, slacks = Schedule(1, 4, "fifo"), []
    for group in range(2):  # two updates between two batches: each batch ahead costs two
        schedule.begin()
        schedule.ready(group)
        schedule.take()
        schedule.updated(2)
    schedule.trained()
    while schedule.may_begin:
        schedule.begin()
        slacks.append(schedule.slack)
    assert slacks == [4, 2, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"groups_per_batch": 0}, "groups_per_batch must be an integer from 1 to"),
        ({"max_staleness": -1}, "max_staleness must be an integer from 0 to"),
        ({"order": "lifo"}, "order must be one of"),
        ({"window": 0.0}, "window must be a finite number above 0"),
        ({"window": 1.5}, "window must be a finite number above 0"),
        ({"over_sample": 0.5}, "over_sample must be a finite number from 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(**{"groups_per_batch": 1, "max_staleness": 1, **arguments})


@settings(max_examples=300)
@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["fifo", "window"]),
    st.sampled_from([0.05, 0.3, 0.7, 1.0]),
    st.lists(st.tuples(st.sampled_from(["ready", "drop", "take", "take", "ready", "ready"]), st.integers(0, 1 << 16))),
)
def test_no_group_is_older_than_promised_and_none_comes_twice(
    per_batch: int, staleness: int, order: str, window: float, events: list[tuple[str, int]]
) -> None:
    """A trainer that updates once a batch, and groups that finish, or are dropped, in any order."""
    schedule = Schedule(per_batch, staleness, order, window)
    version, begun, dropped, given_out = 0, {}, set(), []
    waiting: set[int] = set()
    overtaking = (schedule.window or 1) - 1
    bound = staleness + math.ceil(overtaking / per_batch)
    # at the end everything becomes ready and is taken
    for event, pick in [*events, *[("ready", 0), ("take", 0)] * 100]:
        while schedule.may_begin:
            group = schedule.begin()
            begun[group] = version
            waiting.add(group)
            assert 0 <= schedule.slack <= staleness
        if event == "take":
            if batch := schedule.take():
                assert len(batch) == per_batch
                assert all(version - begun[group] <= bound for group in batch)
                given_out += batch
                version += 1
                schedule.updated()
        elif waiting:
            group = sorted(waiting)[pick % len(waiting)]
            waiting.remove(group)
            if event == "ready":
                schedule.ready(group)
            else:
                dropped.add(group)
                schedule.drop(group)
    assert len(given_out) == len(set(given_out))
    assert not dropped & set(given_out)
    assert version >= 20  # it never gets stuck
    if order == "fifo":
        assert given_out == sorted(given_out)


def test_each_update_may_be_for_one_batch() -> None:
    schedule = Schedule(1, max_staleness=1, order="fifo", window=0.3, over_sample=1.0)

    def given() -> int:
        """Begin, complete and give out what may be; return the batches so far."""
        while schedule.may_begin:
            schedule.ready(schedule.begin())
            schedule.take()
        return schedule.batches

    assert given() == 2  # S + 1
    schedule.updated(by_update=True)
    assert given() == 3
    schedule.updated(5, by_update=True)  # more than were given count for no later ones
    assert given() == 4  # five updates between two batches: none may be ahead
