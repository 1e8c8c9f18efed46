"""Keys of prefixes: equal where prompts are, in every process. The index: bounded; it knows a template by its use."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_moe.modules.serving.prefix_index import HOLDERS, PrefixIndex, prompt_bytes, prompt_keys

TOKENS = st.lists(st.integers(0, 3), max_size=200)


def keys_of(prompt: object) -> list[int]:
    found = prompt_bytes(prompt)
    assert found is not None
    return prompt_keys(*found)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_prompt_has_a_key_for_each_block_and_one_for_its_end() -> None:
    assert [len(prompt_keys(bytes(4 * tokens))) for tokens in (1, 15, 16, 17, 32, 256, 257)] == [1, 1, 2, 2, 3, 17, 17]


def test_later_blocks_grow_so_that_keys_are_few() -> None:
    # 16 blocks to 256 tokens; then 18, 20, 22, 24, 27 blocks, ... each an eighth longer
    assert len(prompt_keys(bytes(4 * 16 * 27))) == 22
    assert len(prompt_keys(bytes(4 * 32768))) < 70


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_prompts_share_the_keys_of_the_blocks_that_they_share(first: list[int], second: list[int]) -> None:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    if not first or not second:
        return
    a, b = keys_of(first), keys_of(second)
    assert [x == y for x, y in zip(a[:-1], b[:-1], strict=False)].count(True) == same // 16
    assert (a[-1] == b[-1]) == (first == second)
    assert len(set(a) & set(b)) == same // 16 + (first == second)


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


def test_text_chats_and_ids_are_told_apart() -> None:
    turn = {"role": "user", "content": "hi"}
    prompts: list[object] = ["hi", [turn], [ord("h"), ord("i")], {"prompt": "hi there"}]
    assert len({tuple(keys_of(prompt)) for prompt in prompts}) == 4
    assert keys_of({"prompt": "hi"}) == keys_of("hi")


def test_a_chat_begins_with_the_keys_of_the_chat_it_goes_on_from() -> None:
    first = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "u" * 100}]
    longer = [*first, {"role": "assistant", "content": "a" * 100}]
    whole_blocks = keys_of(first)[:-1]
    assert len(whole_blocks) >= 3
    assert keys_of(longer)[: len(whole_blocks)] == whole_blocks
    assert keys_of([{"content": "u", "role": "user"}]) == keys_of([{"role": "user", "content": "u"}])


@pytest.mark.parametrize("nothing", [None, "", [], {}, {"prompt": None}, np.zeros(0, np.int32)], ids=repr)
def test_no_prompt_has_no_bytes(nothing: object) -> None:
    assert prompt_bytes(nothing) is None


def test_a_lone_surrogate_is_text_too() -> None:
    assert keys_of("\ud800") != keys_of("\ud801")


def test_keys_are_the_same_in_every_process() -> None:
    code = "from torchrl_moe.modules.serving.prefix_index import *; print(prompt_keys(*prompt_bytes('x' * 100)))"
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


def shared(index: PrefixIndex, key: int, is_distinct: bool = False) -> bool:
    node = index.get(key)
    assert node is not None
    return index.is_shared(node, is_distinct)


def test_it_remembers_which_caches_hold_a_prefix() -> None:
    index = PrefixIndex()
    record(index, [1, 2, 92], cache=5)
    record(index, [1, 3, 93], cache=6)
    record(index, [1, 3, 93], cache=6)
    assert index.get(1) == (2, 0, (5, 6), False)
    assert index.get(2) == (1, 0, (5,), True)
    assert index.get(4) is None
    assert index.match([1, 3, 4, 94]) == ([(2, 0, (5, 6), False), (1, 0, (6,), True)], False)
    assert index.match([1, 4, 95]) == ([(2, 0, (5, 6), False)], True)
    assert index.match([7, 97]) == ([], True)


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    index = PrefixIndex(capacity=4)
    for keys in ([1, 2], [3, 4], [1, 2], [5]):
        record(index, keys, cache=0)
    assert [key for key in range(1, 6) if index.get(key)] == [1, 2, 4, 5]
    for key in range(100, 200):
        record(index, [key, 1000 + key], cache=0)
    assert len(index) == 4


def test_only_the_latest_holders_are_remembered() -> None:
    index = PrefixIndex()
    for cache in range(HOLDERS + 3):
        record(index, [1], cache)
    node = index.get(1)
    assert node is not None
    assert node[2] == tuple(range(3, HOLDERS + 3))


def test_a_template_is_what_more_than_half_of_all_distinct_prompts_begin_with() -> None:
    index = PrefixIndex()
    for _ in range(8):
        record(index, [1, 10, 90], cache=0)  # a group: one prompt, eight times
    assert not shared(index, 1)
    assert shared(index, 1, is_distinct=True)  # the second distinct one is about to come
    record(index, [1, 11, 91], cache=1)
    assert shared(index, 1)
    assert not shared(index, 10)
    record(index, [2, 12, 92], cache=1)
    assert shared(index, 1)  # 2 of 3
    record(index, [2, 13, 93], cache=1)
    assert not shared(index, 1)  # 2 of 4
    assert not shared(index, 2)


def test_the_turns_of_one_conversation_are_one_prompt() -> None:
    index = PrefixIndex()
    for turn in range(1, 6):
        record(index, [*range(turn), 90 + turn], cache=0)
    assert [node[0] for key in range(5) if (node := index.get(key))] == [1] * 5
    record(index, [0, 1, 70, 99], cache=0)  # leaves it after its second block
    assert [node[0] for key in range(5) if (node := index.get(key))] == [2, 2, 1, 1, 1]


def test_a_template_that_is_no_longer_used_is_forgotten() -> None:
    index = PrefixIndex()
    for i in range(3000):
        record(index, [1, 10_000 + i, 50_000 + i], cache=0)
    assert shared(index, 1)
    for i in range(3000):
        record(index, [2, 20_000 + i, 60_000 + i], cache=0)
    assert not shared(index, 1)
    assert shared(index, 2)
