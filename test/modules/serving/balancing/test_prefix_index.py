"""Keys of prefixes: equal where prompts are, in every process. The index: bounded; it knows a template by its use."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_moe.modules.serving.strategies import HOLDERS, PrefixIndex, prompt_bytes, prompt_keys

TOKENS = st.lists(st.integers(0, 3), max_size=200)


def keys_of(prompt: object) -> list[int]:
    found = prompt_bytes(prompt)
    assert found is not None
    return prompt_keys(*found)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_prompt_has_a_key_for_each_block_and_one_for_its_end() -> None:
    assert [len(prompt_keys(bytes(4 * tokens))) for tokens in (1, 31, 32, 33, 64, 256, 257)] == [1, 1, 2, 2, 3, 9, 9]


def test_later_blocks_grow_so_that_keys_are_few() -> None:
    # 16 blocks of 32 tokens, then 4 of 64 (to 24 blocks), then 2 of 96 (to 30): 22 keys, and that of the whole
    assert len(prompt_keys(bytes(4 * 32 * 30))) == 23
    assert len(prompt_keys(bytes(4 * 32768))) < 60


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
    kinds = [
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, np.uint32),
        torch.tensor(ids),
        {"prompt_token_ids": ids},
    ]
    assert len({tuple(keys_of(kind)) for kind in kinds}) == 1


def test_text_chats_and_ids_are_distinguished() -> None:
    turn = {"role": "user", "content": "hi"}
    prompts: list[object] = ["hi", [turn], [ord("h"), ord("i")], {"prompt": "hi there"}]
    assert len({tuple(keys_of(prompt)) for prompt in prompts}) == 4
    assert keys_of({"prompt": "hi"}) == keys_of("hi")


def test_a_chat_begins_with_the_keys_of_the_chat_it_continues_from() -> None:
    first = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "u" * 100}]
    longer = [*first, {"role": "assistant", "content": "a" * 100}]
    whole_blocks = keys_of(first)[:-1]
    assert len(whole_blocks) == 2
    assert keys_of(longer)[: len(whole_blocks)] == whole_blocks
    assert keys_of([{"content": "u", "role": "user"}]) == keys_of([{"role": "user", "content": "u"}])


@pytest.mark.parametrize("nothing", [None, "", [], {}, {"prompt": None}, np.zeros(0, np.int32)], ids=repr)
def test_no_prompt_has_no_bytes(nothing: object) -> None:
    assert prompt_bytes(nothing) is None


def test_a_lone_surrogate_is_text_too() -> None:
    assert keys_of("\ud800") != keys_of("\ud801")


def test_keys_are_the_same_in_every_process() -> None:
    code = "from torchrl_moe.modules.serving.strategies import *; print(prompt_keys(*prompt_bytes('x' * 100)))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{keys_of('x' * 100)}\n"}


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


def test_the_same_prompt_again_adds_its_holder_and_nothing_else() -> None:
    index = PrefixIndex()
    for cache in (5, 6, 5):
        record(index, [1, 2, -1], cache)
    assert branches(index, 1, 2, -1) == [([1, 2, -1], 1, (6, 5))]  # the latest last
    assert len(index) == 3


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


def test_only_the_latest_holders_are_remembered() -> None:
    index = PrefixIndex()
    for cache in range(HOLDERS + 3):
        record(index, [1, -1], cache)
    assert branches(index, 1, -1) == [([1, -1], 1, tuple(range(3, HOLDERS + 3)))]


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
