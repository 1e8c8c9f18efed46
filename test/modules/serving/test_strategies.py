"""Strategies, each by itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from support.clock import Clock
from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.replica_table import Candidates, ReplicaState, ReplicaTable
from torchrl_moe.modules.serving.strategies import (
    KVCache,
    LeastRequests,
    PowerOfTwo,
    PrefixAware,
    PrefixIndex,
    RoundRobin,
    RoutingContext,
    SessionAffinity,
    Strategy,
    prompt_bytes,
    prompt_keys,
)

CONTEXT = RoutingContext()


def table_of(*inflight: int) -> ReplicaTable:
    table = ReplicaTable(range(len(inflight)), ReplicaState.SERVING)
    for entry, count in zip(table, inflight, strict=True):
        entry.inflight = count
    return table


def choices(strategy: Strategy, table: ReplicaTable, allowed: Sequence[Sequence[int]], hold: bool = False) -> list[int]:
    """Choose among each of ``allowed`` in turn; unless ``hold``, a request is over before the next one comes."""
    chosen = []
    for indices in allowed:
        index = strategy.choose(Candidates(table[i] for i in indices), CONTEXT)
        assert index is not None
        table.reserve(index)
        if not hold:
            table.give_back(index)
        chosen.append(index)
    return chosen


def test_the_least_loaded_is_chosen_wherever_it_stands_and_a_tie_goes_to_the_least_recently_chosen() -> None:
    for order in ([0, 1, 2], [2, 1, 0]):
        assert choices(LeastRequests(), table_of(3, 1, 2), [order]) == [1]
    every, without_0, without_1 = [0, 1, 2], [1, 2], [0, 2]
    allowed = [every, every, without_0, without_0, without_1, every, every, every, without_1, every]
    # last chosen:      0      1        2          1          0      2      1      0      2      1
    assert choices(LeastRequests(), table_of(0, 0, 0), allowed) == [0, 1, 2, 1, 0, 2, 1, 0, 2, 1]


def test_round_robin_takes_turns_by_index_ignores_load_and_keeps_the_turn_of_one_that_is_away() -> None:
    assert choices(RoundRobin(), table_of(9, 0, 0), [[2, 0, 1]] * 4) == [0, 1, 2, 0]
    allowed = [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1]]
    # turn:        0             1          3          4 -> 0      1             2          3 -> 1
    assert choices(RoundRobin(), table_of(0, 0, 0, 0), allowed) == [0, 2, 3, 0, 1, 2, 1]


def test_of_two_drawn_the_less_loaded_is_taken_and_never_the_most_loaded_of_all() -> None:
    chosen = Counter(choices(PowerOfTwo(random.Random(0)), table_of(0, 1, 2, 9), [range(4)] * 600))
    # of the six pairs, three hold replica 0, two more have 1 as the lesser, one has 2
    assert chosen.keys() == {0, 1, 2}
    assert chosen[0] == pytest.approx(300, abs=40)
    assert chosen[1] == pytest.approx(200, abs=40)


def used(inflight: Sequence[int], *shares: float | None, at: float = 0.0) -> ReplicaTable:
    """Replicas with so many requests, and what they said of their caches."""
    table = table_of(*inflight)
    for index, share in enumerate(shares):
        if share is not None:
            table.observe(index, at, cache_usage=share)
    return table


def kv(now: float = 0.0) -> KVCache:
    return KVCache(clock=lambda: now)


def test_the_emptiest_cache_is_chosen_and_moves_on_with_the_requests_at_the_mean_share_of_one() -> None:
    assert choices(kv(), used((5, 1, 9), 0.5, 0.9, 0.2), [range(3)]) == [2]  # and not the fewest requests
    # 0.05 a request: level after 4 more on the first, then in turn
    assert choices(kv(), used((10, 10), 0.4, 0.6), [range(2)] * 8, hold=True) == [0] * 4 + [1, 0, 1, 0]
    # one without figures is estimated by its requests: 2 at 0.05
    assert choices(kv(), used((10, 10, 2), 0.4, 0.6, None), [range(3)]) == [2]


def test_stale_stats_are_none() -> None:
    assert kv().choose(Candidates(table_of(5, 1)), CONTEXT) is None
    table = used((5, 1), 0.1, 0.9, at=10.0)
    assert kv(15.0).choose(Candidates(table), CONTEXT) == 0
    assert kv(15.1).choose(Candidates(table), CONTEXT) is None
    table.observe(1, 14.0, cache_usage=0.9)
    assert kv(15.1).choose(Candidates(table), CONTEXT) == 1  # 0.9 known; the other has five times its requests


# -- sessions ----------------------------------------------------------------------------------------------------------


class Sessions:
    """A balancer of sessions."""

    def __init__(self, num_replicas: int, **kwargs: float) -> None:
        self.clock = Clock()
        self._strategy = SessionAffinity(clock=self.clock, **kwargs)
        self.lb = LoadBalancer(list(range(num_replicas)), [self._strategy, "requests"])

    def turn(self, session: str) -> int:
        with self.lb.acquire(session_id=session) as lease:
            return lease.index

    @property
    def active(self) -> list[int]:
        return [self._strategy._sessions[entry.index] for entry in self.lb.replica_table]

    def states(self, *states: ReplicaState) -> None:
        """Of the first replica, one after another."""
        for state in states:
            self.lb.replica_table.set_state(0, state)


def test_a_session_moves_for_good_when_its_replica_is_too_busy() -> None:
    sessions = Sessions(2, margin=2.0)
    sessions.turn("a")
    held = [sessions.lb.acquire_at(0) for _ in range(3)]
    assert sessions.turn("a") == 0  # 3 + 1 is no more than the mean of 2 and two above
    held.append(sessions.lb.acquire_at(0))
    assert sessions.turn("a") == 1
    for lease in held:
        lease.release()
    assert sessions.turn("a") == 1
    assert sessions.active == [0, 1]


@pytest.mark.parametrize("away", [ReplicaState.DRAINING, ReplicaState.SYNCING])
def test_a_short_drain_borrows_a_replica_and_the_session_returns(away: ReplicaState) -> None:
    sessions = Sessions(3)
    assert [sessions.turn(name) for name in "ab"] == [0, 1]
    sessions.states(away)
    assert sessions.turn("a") == 2  # as the next strategy says
    assert sessions.active == [1, 1, 0]
    sessions.states(ReplicaState.SERVING)
    assert sessions.turn("a") == 0


@pytest.mark.parametrize("gone", [ReplicaState.DEAD, ReplicaState.QUARANTINED])
def test_death_moves_the_session_for_good(gone: ReplicaState) -> None:
    sessions = Sessions(2)
    assert sessions.turn("a") == 0
    sessions.states(gone)
    assert sessions.turn("a") == 1
    sessions.states(ReplicaState.STARTING, ReplicaState.SERVING)
    assert sessions.turn("a") == 1
    assert sessions.active == [0, 1]


def test_a_silent_session_ends_and_a_turn_keeps_it() -> None:
    sessions = Sessions(2, idle_seconds=10.0)
    for now, session, index in ((0.0, "a", 0), (0.0, "b", 1), (8.0, "a", 0), (12.0, "c", 1)):
        sessions.clock.now = now
        assert sessions.turn(session) == index
    assert sessions.active == [1, 1]  # b has been silent for 12 seconds, and c has its place
    sessions.clock.now = 18.0
    assert sessions.turn("a") == 0
    sessions.clock.now = 40.0
    assert sessions.turn("d") == 0  # no session is left, and 1 was the last to get one: c
    assert sessions.active == [1, 0]


def test_a_finished_session_gives_its_place_back_once_and_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(2)
    assert [sessions.turn(name) for name in "ab"] == [0, 1]
    for name in ("a", "a", "unknown"):
        sessions.lb.finish_session(name)
    assert sessions.active == [0, 1]
    assert sessions.turn("c") == 0
    monkeypatch.setattr("torchrl_moe.modules.serving.strategies.MOST_SESSIONS", 3)
    for i in range(10):
        sessions.turn(f"{i}")
    assert sum(sessions.active) == 3


# -- prefixes ----------------------------------------------------------------------------------------------------------


def with_prefixes(num_replicas: int, **kwargs: float) -> LoadBalancer:
    return LoadBalancer(list(range(num_replicas)), [PrefixAware(**kwargs), "requests"])  # type: ignore[arg-type]


def question(number: int, tokens: int = 40) -> list[int]:
    return [1000 + number] * tokens


def place(lb: LoadBalancer, prompts: Sequence[object]) -> list[int]:
    indices = []
    for prompt in prompts:
        with lb.acquire(prompt) as lease:
            indices.append(lease.index)
    return indices


USER = {"role": "user", "content": "a" * 200}


@pytest.mark.parametrize(
    ("prompt", "longer"),
    [
        (question(1), question(1) + [7] * 50),
        ("a" * 200, "a" * 200 + "b" * 100),
        ([USER], [USER, {"role": "x", "content": ""}]),
    ],
    ids=["ids", "text", "chat"],
)
def test_a_longer_prompt_goes_where_its_beginning_went(prompt: object, longer: object) -> None:
    lb = with_prefixes(4)
    lb.acquire_at(3, prompt=prompt).release()
    assert place(lb, [longer, "c" * 200, prompt, longer]) == [3, 0, 3, 3]


def test_the_longest_of_several_beginnings_decides() -> None:
    lb = with_prefixes(3)
    place(lb, [question(i) for i in range(2, 10)])  # so that nothing below is a template
    lb.acquire_at(0, prompt=question(1, 32)).release()
    lb.acquire_at(1, prompt=question(1, 64)).release()
    assert place(lb, [question(1, 80), question(1, 40) + [5] * 40]) == [1, 0]


def test_distinct_questions_behind_one_template_fan_out_on_idle_replicas() -> None:
    assert place(with_prefixes(4), [[*range(100), *question(i)] for i in range(8)]) == [0, 1, 2, 3] * 2


def test_a_group_on_idle_replicas_is_a_burst_and_is_spread() -> None:
    lb = with_prefixes(4)
    for total in range(1, 65):
        lb.acquire(question(1))
        assert max(entry.inflight for entry in lb.replica_table) <= max(1.15 * total / 4, total / 4 + 1)


def test_a_prompt_that_spills_has_one_home_again_afterwards() -> None:
    lb = with_prefixes(8)
    place(lb, [question(9), question(8)])
    lb.acquire_at(0, prompt=question(1)).release()
    first, second = lb.acquire(question(1)), lb.acquire(question(1))
    assert (first.index, second.index) == (0, 2)  # one above the mean is too many on an idle fleet; 2 is next in turn
    first.release()
    second.release()
    assert place(lb, [question(1)] * 10) == [2] * 10  # the other may have evicted it by now


def test_a_prefix_that_many_prompts_begin_with_has_several_homes() -> None:
    lb = with_prefixes(8)
    place(lb, [question(i) for i in range(30)])
    document = [7] * 200
    for i in range(8):
        lb.acquire_at((0, 5)[i % 2], prompt=document + question(100 + i)).release()
    with lb.acquire_at(5):  # too busy for more: the other one has it too
        assert place(lb, [document + question(200)]) == [0]
    assert lb.acquire().index not in (0, 5)  # whose turn would it have been


@pytest.mark.parametrize("lost", ["restart", "reset", "other weights"])
def test_a_lost_cache_counts_for_nothing(lost: str) -> None:
    lb = with_prefixes(4)
    lb.acquire_at(2, prompt=question(1)).release()
    assert place(lb, [question(1)]) == [2]
    if lost == "restart":
        for state in (ReplicaState.DEAD, ReplicaState.STARTING, ReplicaState.SERVING):
            lb.replica_table.set_state(2, state)
    elif lost == "reset":
        lb.replica_table.forget_prefixes(2)
    else:
        lb.replica_table.set_version(2, 1)
    assert place(lb, [question(1)]) == [0]
    lb.acquire_at(2, prompt=question(2)).release()
    assert place(lb, [question(2)]) == [2]  # what it has read since counts


def test_prefix_length_limits_what_is_looked_at() -> None:
    lb = with_prefixes(4, prefix_length=32)
    place(lb, [question(9), question(8)])
    lb.acquire_at(3, prompt=question(1, 32) + [5] * 100).release()
    assert place(lb, [question(1, 32) + [6] * 100]) == [3]
    assert place(lb, [question(1, 15) + [6] * 100]) == [2]  # another first block: the next in turn
    with pytest.raises(ValueError, match="prefix_length must be"):
        PrefixAware(prefix_length=0)


@pytest.mark.parametrize(("threshold", "most"), [(1.0, 11), (1.5, 32)])
def test_the_threshold_says_how_far_above_the_mean_affinity_goes(threshold: float, most: int) -> None:
    """With k placed, a replica takes no more than (160 + k) / 4 + 1 = 51 of 40 + 11, or 1.5 * (160 + k) / 4."""
    lb = with_prefixes(4, overload_threshold=threshold)
    for i in range(160):
        lb.acquire_at(i % 4)
    assert max(Counter(lb.acquire(question(1)).index for _ in range(40)).values()) == most


# -- keys of prefixes -------------------------------------------------------------------------------------------------


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=200)


def keys_of(prompt: object) -> list[int]:
    found = prompt_bytes(prompt)
    assert found is not None
    return prompt_keys(*found)


@given(TOKENS, TOKENS)
def test_prompts_share_the_keys_of_the_blocks_that_they_share(first: list[int], second: list[int]) -> None:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    a, b = keys_of(first), keys_of(second)
    assert [x == y for x, y in zip(a[:-1], b[:-1], strict=False)].count(True) == same // 32
    assert (a[-1] == b[-1]) == (first == second)
    assert len(set(a) & set(b)) == same // 32 + (first == second)


def test_ids_of_any_kind_have_the_same_keys_one_for_each_block_and_one_for_the_end() -> None:
    ids = [5, 70000, 0, 2**31 - 1]
    kinds = [ids, tuple(ids), np.array(ids), np.array(ids, np.uint32), torch.tensor(ids), {"prompt_token_ids": ids}]
    assert len({tuple(keys_of(kind)) for kind in kinds}) == 1
    assert [len(keys_of([7] * tokens)) for tokens in (1, 31, 32, 33, 64, 256, 257)] == [1, 1, 2, 2, 3, 9, 9]


def test_text_chats_and_ids_are_distinguished() -> None:
    turn = {"role": "user", "content": "hi"}
    prompts = ["hi", [turn], [ord("h"), ord("i")], {"prompt": "hi there"}, "\ud800", "\ud801"]
    assert len({tuple(keys_of(prompt)) for prompt in prompts}) == len(prompts)
    assert keys_of({"prompt": "hi"}) == keys_of("hi")
    assert keys_of([{"content": "hi", "role": "user"}]) == keys_of([turn])
    assert keys_of("x" * 100) == [-1 - xxh3_64_intdigest(b"x" * 100, 1)]  # the same in every process


def record(index: PrefixIndex, *prompts: list[int], cache: int = 0) -> None:
    for keys in prompts:
        index.record(keys, cache, index.match(keys)[1])


def branches(index: PrefixIndex, *keys: int) -> list[tuple[list[int], int, tuple[int, ...]]]:
    """The branches on the way: run, distinct prompts, caches."""
    return [(run, prompts, caches) for run, prompts, _, caches in index.match(list(keys))[0]]


def share(index: PrefixIndex, *keys: int) -> list[float]:
    """Of the branches on the way."""
    known, distinct = index.match(list(keys))
    return [index.share(branch, distinct) for branch in known]


def test_a_prompt_is_distinct_unless_it_came_before_or_continues_from_one() -> None:
    index = PrefixIndex()
    record(index, [1, 2, -1])
    for keys, distinct in (([1, 2, -1], False), ([1, 2, 3, -2], False), ([1, 3, -3], True), ([1, -4], True)):
        assert index.match(keys)[1] is distinct
    record(index, [1, 2, 3, -2])  # the next turn
    assert index.match([1, 2, 4, -5])[1]  # another next turn of the same: a second sibling


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    index = PrefixIndex(capacity=6)
    record(index, [1, -1], [3, 4, -3], [1, -1], [5, -5])
    assert [bool(branches(index, *keys)) for keys in ([1, -1], [3, 4, -3], [5, -5])] == [True, False, True]
    record(index, *([key, 1000 + key, -key] for key in range(100, 200)))
    assert len(index) == 6
    index = PrefixIndex(capacity=7)  # what leads to a branch outlives it
    record(index, [1, 2, 3, -1], [1, 2, 4, -2], [9, -9])  # 6 keys: [1, 2], [3, -1], [4, -2]; and two more
    assert branches(index, 1, 2, 3, -1) == [([1, 2], 2, (0,))]
    assert branches(index, 1, 2, 4, -2) == [([1, 2], 2, (0,)), ([4, -2], 1, (0,))]
    assert len(index) == 6


def test_a_share_is_of_distinct_prompts_and_the_turns_of_one_conversation_are_one() -> None:
    index = PrefixIndex()
    record(index, *[[1, 10, -10]] * 8)  # a group: one prompt, eight times
    assert share(index, 1, 10, -10) == [0.0]  # what only one begins with is not shared
    assert share(index, 1, 11, -11) == [1.0]  # the second one is about to come
    record(index, [1, 10, -10], [1, 11, -11], [2, -2], [3, -3])
    assert share(index, 1, 10, -10) == [0.5, 0.0]
    assert share(index, 1, 12, -12) == [0.6]  # 3 of 5, the new one counted
    record(index, *([50 + one for one in range(turn)] + [-50 - turn] for turn in range(1, 6)))
    record(index, [50, 51, 70, -70])  # leaves the conversation after its second block
    assert [prompts for _, prompts, _ in branches(index, *range(50, 55), -55)] == [2, 2, 1, 1, 1]


def test_what_is_no_longer_used_loses_its_share() -> None:
    index = PrefixIndex()
    record(index, *([1, 10_000 + i, -10_000 - i] for i in range(3000)))
    assert share(index, 1, 10_000, -10_000)[0] == 1.0
    record(index, *([2, 20_000 + i, -20_000 - i] for i in range(3000)))
    assert share(index, 1, 10_000, -10_000)[0] < 0.25
    assert share(index, 2, 20_000, -20_000)[0] > 0.75


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 3)), max_size=30))
def test_the_tree_agrees_with_a_list_of_all_prompts(prompts: list[tuple[list[int], int]]) -> None:
    index = PrefixIndex()
    seen: list[tuple[list[int], int]] = []
    for path, cache in prompts:
        # chained as hashes are: a key names the path to it
        keys = [int("1" + "".join(map(str, path[: i + 1])), 3) for i in range(len(path))]
        keys.append(-int("1" + "".join(map(str, path)), 3))
        known, distinct = index.match(keys)
        position = 0
        for run, _, _, caches in known:
            common = sum(a == b for a, b in zip(run, keys[position:], strict=False))
            through = {c for other, c in seen if other[: position + common] == keys[: position + common]}
            assert set(caches) <= through
            position += common
        assert position == max((sum(a == b for a, b in zip(keys, old, strict=False)) for old, _ in seen), default=0)
        assert distinct or any(other[:-1] == keys[: len(other) - 1] for other, _ in seen)
        record(index, keys, cache=cache)
        seen.append((keys, cache))
    assert len(index) == len({tuple(keys[: i + 1]) for keys, _ in seen for i in range(len(keys))})
