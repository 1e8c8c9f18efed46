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
from torchrl_moe.modules.serving.candidates import Candidates, ReplicaState
from torchrl_moe.modules.serving.replica_table import ReplicaTable
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


def test_the_least_loaded_is_chosen_wherever_it_stands() -> None:
    table = table_of(3, 1, 2)
    assert LeastRequests().choose(Candidates(table), CONTEXT) == 1
    assert LeastRequests().choose(Candidates(list(table)[::-1]), CONTEXT) == 1
    assert LeastRequests().choose(Candidates([table[0], table[2]]), CONTEXT) == 2


def test_a_tie_goes_to_the_least_recently_chosen_while_candidates_come_and_go() -> None:
    every, without_0, without_1 = [0, 1, 2], [1, 2], [0, 2]
    allowed = [every, every, without_0, without_0, without_1, every, every, every, without_1, every]
    # last chosen:      0      1        2          1          0      2      1      0      2      1
    assert choices(LeastRequests(), table_of(0, 0, 0), allowed) == [0, 1, 2, 1, 0, 2, 1, 0, 2, 1]


def test_round_robin_takes_turns_by_index_ignores_load_and_keeps_the_turn_of_one_that_is_away() -> None:
    assert choices(RoundRobin(), table_of(9, 0, 0), [[0, 1, 2]] * 7) == [0, 1, 2, 0, 1, 2, 0]
    assert choices(RoundRobin(), table_of(0, 0, 0), [[2, 0, 1]] * 4) == [0, 1, 2, 0]
    allowed = [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1]]
    # turn:        0             1          3          4 -> 0      1             2          3 -> 1
    assert choices(RoundRobin(), table_of(0, 0, 0, 0), allowed) == [0, 2, 3, 0, 1, 2, 1]


# -- power of two -----------------------------------------------------------------------------------------------------


def test_of_two_drawn_the_less_loaded_is_taken_and_never_the_most_loaded_of_all() -> None:
    strategy = PowerOfTwo(random.Random(0))
    chosen = Counter(choices(strategy, table_of(0, 1, 2, 9), [range(4)] * 600))
    # of the six pairs, three hold replica 0, two more have 1 as the lesser, one has 2
    assert chosen.keys() == {0, 1, 2}
    assert chosen[0] == pytest.approx(300, abs=40)
    assert chosen[1] == pytest.approx(200, abs=40)


# -- KV cache ---------------------------------------------------------------------------------------------------------


def usage_of(table: ReplicaTable, at: float, *shares: float | None) -> None:
    for index, share in enumerate(shares):
        if share is not None:
            table.observe(index, at, cache_usage=share)


def kv(now: float = 0.0) -> KVCache:
    return KVCache(clock=lambda: now)


def test_the_emptiest_cache_is_chosen_and_not_the_fewest_requests() -> None:
    table = table_of(5, 1, 9)
    usage_of(table, 0.0, 0.5, 0.9, 0.2)
    assert choices(kv(), table, [range(3)]) == [2]


def test_stats_move_on_with_the_requests_so_that_none_is_piled_upon() -> None:
    table = table_of(10, 10)
    usage_of(table, 0.0, 0.4, 0.6)  # 0.05 a request: level after 4 more on the first, then in turn
    assert choices(kv(), table, [range(2)] * 8, hold=True) == [0] * 4 + [1, 0, 1, 0]


def test_a_replica_without_figures_is_estimated_by_its_requests() -> None:
    table = table_of(10, 10, 2)
    usage_of(table, 0.0, 0.4, 0.6, None)  # 2 requests at 0.05
    assert choices(kv(), table, [range(3)]) == [2]
    assert choices(kv(), table, [range(2)]) == [0]


def test_stale_stats_are_none() -> None:
    table = table_of(5, 1)
    assert kv().choose(Candidates(table), CONTEXT) is None
    usage_of(table, 10.0, 0.1, 0.9)
    assert kv(15.0).choose(Candidates(table), CONTEXT) == 0
    assert kv(15.1).choose(Candidates(table), CONTEXT) is None
    table.observe(1, 14.0, cache_usage=0.9)
    assert kv(15.1).choose(Candidates(table), CONTEXT) == 1  # 0.9 known; the other has five times its requests


# -- sessions ----------------------------------------------------------------------------------------------------------


def with_sessions(num_replicas: int, **kwargs: object) -> tuple[LoadBalancer, SessionAffinity]:
    strategy = SessionAffinity(**kwargs)  # type: ignore[arg-type]
    return LoadBalancer(list(range(num_replicas)), [strategy, "requests"]), strategy


def turn(lb: LoadBalancer, session: str) -> int:
    with lb.acquire(session_id=session) as lease:
        return lease.index


def active(lb: LoadBalancer, strategy: SessionAffinity) -> list[int]:
    return [strategy._sessions[index] for index in range(len(lb.replica_table))]


def test_8_sessions_on_8_idle_replicas_fan_out_one_each_and_stay() -> None:
    lb, _ = with_sessions(8)
    first = [turn(lb, f"{i}") for i in range(8)]
    assert first == list(range(8))
    for _ in range(3):
        assert [turn(lb, f"{i}") for i in range(8)] == first


def test_a_session_moves_for_good_when_its_replica_is_too_busy() -> None:
    lb, strategy = with_sessions(2, margin=2.0)
    turn(lb, "a")
    held = [lb.acquire_at(0) for _ in range(3)]
    assert turn(lb, "a") == 0  # 3 + 1 is no more than the mean of 2 and two above
    held.append(lb.acquire_at(0))
    assert turn(lb, "a") == 1
    for lease in held:
        lease.release()
    assert turn(lb, "a") == 1
    assert active(lb, strategy) == [0, 1]


@pytest.mark.parametrize("away", [ReplicaState.DRAINING, ReplicaState.SYNCING])
def test_a_short_drain_borrows_a_replica_and_the_session_returns(away: ReplicaState) -> None:
    lb, strategy = with_sessions(3)
    assert [turn(lb, name) for name in "ab"] == [0, 1]
    lb.replica_table.set_state(0, away)
    assert turn(lb, "a") == 2  # as the next strategy says
    assert active(lb, strategy) == [1, 1, 0]
    lb.replica_table.set_state(0, ReplicaState.SERVING)
    assert turn(lb, "a") == 0


@pytest.mark.parametrize("gone", [ReplicaState.DEAD, ReplicaState.QUARANTINED])
def test_death_moves_the_session_for_good(gone: ReplicaState) -> None:
    lb, strategy = with_sessions(2)
    assert turn(lb, "a") == 0
    lb.replica_table.set_state(0, gone)
    assert turn(lb, "a") == 1
    lb.replica_table.set_state(0, ReplicaState.STARTING)
    lb.replica_table.set_state(0, ReplicaState.SERVING)
    assert turn(lb, "a") == 1
    assert active(lb, strategy) == [0, 1]


def test_a_silent_session_ends_and_a_turn_keeps_it() -> None:
    clock = Clock()
    lb, strategy = with_sessions(2, idle_seconds=10.0, clock=clock)
    turn(lb, "a")
    turn(lb, "b")
    clock.now = 8.0
    turn(lb, "a")
    clock.now = 12.0
    turn(lb, "c")  # b has been silent for 12 seconds: its replica has room
    assert active(lb, strategy) == [1, 1]
    clock.now = 18.0
    assert turn(lb, "a") == 0
    clock.now = 40.0
    assert turn(lb, "d") == 0  # no session is left, and 1 was the last to get one: c
    assert active(lb, strategy) == [1, 0]


def test_a_finished_session_gives_its_place_back_once() -> None:
    lb, strategy = with_sessions(2)
    turn(lb, "a")
    turn(lb, "b")
    lb.finish_session("a")
    lb.finish_session("a")
    lb.finish_session("unknown")
    assert active(lb, strategy) == [0, 1]
    assert turn(lb, "c") == 0


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_moe.modules.serving.strategies.MOST_SESSIONS", 3)
    lb, strategy = with_sessions(2)
    for i in range(10):
        turn(lb, f"{i}")
    assert sum(active(lb, strategy)) == 3


# -- prefixes ----------------------------------------------------------------------------------------------------------


TEMPLATE = list(range(100))


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


def test_a_longer_prompt_goes_where_its_beginning_went() -> None:
    lb = with_prefixes(4)
    first = place(lb, [question(i) for i in range(4)])
    assert first == [0, 1, 2, 3]
    longer = [question(i) + [7] * 50 for i in (2, 0, 3, 1)]
    assert place(lb, longer) == [2, 0, 3, 1]
    assert place(lb, [prompt + [8] * 50 for prompt in longer]) == [2, 0, 3, 1]


def test_the_longest_of_several_beginnings_decides() -> None:
    lb = with_prefixes(3)
    place(lb, [question(i) for i in range(2, 10)])  # so that nothing below is a template
    lb.acquire_at(0, prompt=question(1, 32)).release()
    lb.acquire_at(1, prompt=question(1, 64)).release()
    assert place(lb, [question(1, 80), question(1, 40) + [5] * 40]) == [1, 0]


def test_distinct_questions_behind_one_template_fan_out_on_idle_replicas() -> None:
    lb = with_prefixes(4)
    assert place(lb, [TEMPLATE + question(i) for i in range(8)]) == [0, 1, 2, 3] * 2


def test_a_group_on_idle_replicas_is_a_burst_and_is_spread() -> None:
    lb = with_prefixes(4)
    for total, _ in enumerate(range(64), 1):
        lb.acquire(question(1))
        mean = total / 4
        assert max(entry.inflight for entry in lb.replica_table) <= max(1.15 * mean, mean + 1)


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


def test_a_holder_that_is_away_is_replaced_for_the_while() -> None:
    lb = with_prefixes(4)
    lb.acquire_at(2, prompt=question(1)).release()
    lb.replica_table.set_state(2, ReplicaState.DRAINING)
    assert place(lb, [question(1)] * 3) == [0, 0, 0]
    lb.replica_table.set_state(2, ReplicaState.SERVING)
    assert set(place(lb, [question(1)] * 4)) <= {0, 2}


@pytest.mark.parametrize(
    ("prompt", "longer"),
    [
        ("a" * 200, "a" * 200 + "b" * 100),
        (
            [{"role": "user", "content": "a" * 200}],
            [{"role": "user", "content": "a" * 200}, {"role": "x", "content": ""}],
        ),
    ],
    ids=["text", "chat"],
)
def test_text_and_chats_have_prefixes_too(prompt: object, longer: object) -> None:
    lb = with_prefixes(4)
    lb.acquire_at(3, prompt=prompt).release()
    assert place(lb, [longer, "c" * 200, prompt]) == [3, 0, 3]


def test_prefix_length_limits_what_is_looked_at() -> None:
    lb = with_prefixes(4, prefix_length=32)
    place(lb, [question(9), question(8)])
    lb.acquire_at(3, prompt=question(1, 32) + [5] * 100).release()
    assert place(lb, [question(1, 32) + [6] * 100]) == [3]
    assert place(lb, [question(1, 15) + [6] * 100]) == [2]  # another first block: the next in turn


def test_the_threshold_says_how_far_above_the_mean_affinity_goes() -> None:
    counts = {}
    for threshold in (1.0, 1.5):
        lb = with_prefixes(4, overload_threshold=threshold)
        for i in range(160):
            lb.acquire_at(i % 4)
        counts[threshold] = Counter(lb.acquire(question(1)).index for _ in range(40)).most_common(1)[0][1]
    # with k placed, a replica takes no more than (160 + k) / 4 + 1 = 51 of 40 + 11; or 1.5 * (160 + k) / 4, which the
    # first 32 on one replica keep to
    assert counts == {1.0: 11, 1.5: 32}


# -- keys of prefixes -------------------------------------------------------------------------------------------------


TOKENS = st.lists(st.integers(0, 3), max_size=200)


def keys_of(prompt: object) -> list[int]:
    found = prompt_bytes(prompt)
    assert found is not None
    return prompt_keys(*found)


def test_a_prompt_has_a_key_for_each_block_and_one_for_its_end() -> None:
    assert [len(prompt_keys(bytes(4 * tokens))) for tokens in (1, 31, 32, 33, 64, 256, 257)] == [1, 1, 2, 2, 3, 9, 9]


@given(TOKENS, TOKENS)
def test_prompts_share_the_keys_of_the_blocks_that_they_share(first: list[int], second: list[int]) -> None:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    if not first or not second:
        return
    a, b = keys_of(first), keys_of(second)
    assert [x == y for x, y in zip(a[:-1], b[:-1], strict=False)].count(True) == same // 32
    assert (a[-1] == b[-1]) == (first == second)
    assert len(set(a) & set(b)) == same // 32 + (first == second)


def test_ids_of_any_kind_have_the_same_keys() -> None:
    ids = [5, 70000, 0, 2**31 - 1]
    kinds = [ids, tuple(ids), np.array(ids), np.array(ids, np.uint32), torch.tensor(ids), {"prompt_token_ids": ids}]
    assert len({tuple(keys_of(kind)) for kind in kinds}) == 1


def test_text_chats_and_ids_are_distinguished() -> None:
    turn = {"role": "user", "content": "hi"}
    prompts: list[object] = ["hi", [turn], [ord("h"), ord("i")], {"prompt": "hi there"}]
    assert len({tuple(keys_of(prompt)) for prompt in prompts}) == 4
    assert keys_of({"prompt": "hi"}) == keys_of("hi")
    assert keys_of("x" * 100) == [-1 - xxh3_64_intdigest(b"x" * 100, 1)]  # the same in every process


def test_a_chat_begins_with_the_keys_of_the_chat_it_continues_from() -> None:
    first = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "u" * 100}]
    longer = [*first, {"role": "assistant", "content": "a" * 100}]
    whole_blocks = keys_of(first)[:-1]
    assert len(whole_blocks) == 2
    assert keys_of(longer)[: len(whole_blocks)] == whole_blocks
    assert keys_of([{"content": "u", "role": "user"}]) == keys_of([{"role": "user", "content": "u"}])


def test_a_lone_surrogate_is_text_too() -> None:
    assert keys_of("\ud800") != keys_of("\ud801")


# -- index ------------------------------------------------------------------------------------------------------------


def record(index: PrefixIndex, keys: list[int], cache: int = 0) -> None:
    index.record(keys, cache, index.match(keys)[1])


def branches(index: PrefixIndex, *keys: int) -> list[tuple[list[int], int, tuple[int, ...]]]:
    """The branches on the way: run, distinct prompts, caches."""
    return [(run, prompts, caches) for run, prompts, _, caches in index.match(list(keys))[0]]


def is_distinct(index: PrefixIndex, *keys: int) -> bool:
    return index.match(list(keys))[1]


def share(index: PrefixIndex, *keys: int) -> float:
    known, distinct = index.match(list(keys))
    return index.share(known[0], distinct)


def test_prompts_branch_where_they_differ() -> None:
    index = PrefixIndex()
    record(index, [1, 2, 3, -1], cache=5)
    assert branches(index, 1, 2, 3, -1) == [([1, 2, 3, -1], 1, (5,))]
    record(index, [1, 2, 4, -2], cache=6)
    assert branches(index, 1, 2, 3, -1) == [([1, 2], 2, (5, 6)), ([3, -1], 1, (5,))]
    assert branches(index, 1, 2, 4, -2) == [([1, 2], 2, (5, 6)), ([4, -2], 1, (6,))]
    assert branches(index, 1, 9, -3) == [([1, 2], 2, (5, 6))]  # part of the way
    assert branches(index, 9, -3) == []


def test_a_prompt_is_distinct_unless_it_came_before_or_continues_from_one() -> None:
    index = PrefixIndex()
    assert is_distinct(index, 1, 2, -1)
    record(index, [1, 2, -1])
    assert not is_distinct(index, 1, 2, -1)
    assert not is_distinct(index, 1, 2, 3, -2)  # the next turn
    assert is_distinct(index, 1, 3, -3)
    assert is_distinct(index, 1, -4)
    record(index, [1, 2, 3, -2])
    assert is_distinct(index, 1, 2, 4, -5)  # another next turn of the same: a second sibling


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    index = PrefixIndex(capacity=6)
    for keys in ([1, -1], [3, 4, -3], [1, -1], [5, -5]):
        record(index, keys)
    assert [bool(branches(index, *keys)) for keys in ([1, -1], [3, 4, -3], [5, -5])] == [True, False, True]
    for key in range(100, 200):
        record(index, [key, 1000 + key, -key])
    assert len(index) == 6


def test_what_leads_to_a_branch_outlives_it() -> None:
    index = PrefixIndex(capacity=7)
    record(index, [1, 2, 3, -1])
    record(index, [1, 2, 4, -2])  # 6 keys: [1, 2], [3, -1], [4, -2]
    record(index, [9, -9])
    assert branches(index, 1, 2, 3, -1) == [([1, 2], 2, (0,))]
    assert branches(index, 1, 2, 4, -2) == [([1, 2], 2, (0,)), ([4, -2], 1, (0,))]
    assert len(index) == 6


def test_a_share_is_of_distinct_prompts() -> None:
    index = PrefixIndex()
    for _ in range(8):
        record(index, [1, 10, -10])  # a group: one prompt, eight times
    assert share(index, 1, 10, -10) == 0.0  # what only one begins with is not shared
    assert share(index, 1, 11, -11) == 1.0  # the second one is about to come
    for keys in ([1, 10, -10], [1, 11, -11], [2, -2], [3, -3]):
        record(index, keys)
    (template, question), distinct = index.match([1, 10, -10])
    assert (index.share(template, distinct), index.share(question, distinct)) == (0.5, 0.0)
    (template,), distinct = index.match([1, 12, -12])
    assert index.share(template, distinct) == 0.6  # 3 of 5, the new one counted


def test_the_turns_of_one_conversation_are_one_prompt() -> None:
    index = PrefixIndex()
    for turn in range(1, 6):
        record(index, [*range(turn), -turn])
    assert [prompts for _, prompts, _ in branches(index, *range(5), -5)] == [1] * 5
    record(index, [0, 1, 70, -70])  # leaves it after its second block
    assert [prompts for _, prompts, _ in branches(index, *range(5), -5)] == [2, 2, 1, 1, 1]


def test_what_is_no_longer_used_loses_its_share() -> None:
    index = PrefixIndex()
    for i in range(3000):
        record(index, [1, 10_000 + i, -10_000 - i])
    assert share(index, 1, 10_000, -10_000) == 1.0
    for i in range(3000):
        record(index, [2, 20_000 + i, -20_000 - i])
    assert share(index, 1, 10_000, -10_000) < 0.25
    assert share(index, 2, 20_000, -20_000) > 0.75


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 3)), max_size=30))
def test_the_tree_agrees_with_a_list_of_all_prompts(prompts: list[tuple[list[int], int]]) -> None:
    index = PrefixIndex()
    seen: list[tuple[list[int], int]] = []
    for path, cache in prompts:
        # chained as hashes are: a key names the path to it
        keys = [int("1" + "".join(map(str, path[: i + 1])), 3) for i in range(len(path))]
        keys.append(-int("1" + "".join(map(str, path)), 3))
        for known, _ in [index.match(keys)]:
            position = 0
            for run, _, _, caches in known:
                common = sum(a == b for a, b in zip(run, keys[position:], strict=False))
                through = {c for other, c in seen if other[: position + common] == keys[: position + common]}
                assert set(caches) <= through
                position += common
            longest = max((sum(a == b for a, b in zip(keys, other, strict=False)) for other, _ in seen), default=0)
            assert position == longest
        assert index.match(keys)[1] or any(other[:-1] == keys[: len(other) - 1] for other, _ in seen)
        record(index, keys, cache)
        seen.append((keys, cache))
    assert len(index) == len({tuple(keys[: i + 1]) for keys, _ in seen for i in range(len(keys))})
