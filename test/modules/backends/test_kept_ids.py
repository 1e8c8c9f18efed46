"""What workers say of words, as arrays: against the mask that was meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import dense_mask
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import KeptIds, leaves_words_out, name_kept

INF = float("inf")


def kept(ids: list[int], sizes: list[int]) -> KeptIds:
    return KeptIds(np.array(ids, np.int32), np.array(sizes, np.int32))


def check(got: KeptIds | None, ids: list[int], sizes: list[int]) -> None:
    assert got is not None
    assert (got.ids.dtype, got.sizes.dtype) == (np.int32, np.int32)
    assert (got.ids.tolist(), got.sizes.tolist()) == (ids, sizes)


def log_probs_of(mask: torch.Tensor) -> torch.Tensor:
    """Some finite log-probs, -inf where a word is left out."""
    return torch.linspace(-60.0, -0.1, mask.numel()).view(mask.shape).masked_fill(~mask, -INF)


def test_a_batch_by_hand() -> None:
    mask = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 1]]).bool()
    named = name_kept(log_probs_of(mask), [5, 6, 0, 7])
    assert named is not None
    steps, offsets = named
    assert (steps.dtype, offsets.dtype) == (np.int32, np.int64)
    assert offsets.tolist() == [0, 3, 3, 5, 7]
    assert steps.tolist() == [5, 1, 3, 0, ~1, 7, 3]


def test_a_batch_of_all_words_says_nothing() -> None:
    assert name_kept(torch.zeros(3, 4), [0, 1, 2]) is None
    assert name_kept(torch.tensor([[-1e30, 0.0]]), [0]) is None  # unlikely is not left out


@pytest.mark.parametrize(("words", "removed", "step"), [(4, 2, [0, 2, 3]), (5, 2, [0, ~0, ~1]), (5, 3, [0, 3, 4])])
def test_the_shorter_list_is_named(words: int, removed: int, step: list[int]) -> None:
    mask = torch.arange(words)[None] >= removed
    named = name_kept(log_probs_of(mask), [0])
    assert named is not None
    assert named[0].tolist() == step


def test_steps_become_an_answers_words() -> None:
    steps = [np.array(step, np.int32) for step in ([0, 5, 7], [], [2, ~3, ~0], [3, 9])]
    check(KeptIds.of_steps(steps, 5), [5, 7, 3, 0, 9], [2, 0, -2, 1, 0])
    check(KeptIds.of_steps(steps, 3), [5, 7, 3, 0], [2, 0, -2])  # a token past a stop string is no part of it
    check(KeptIds.of_steps([np.array([1, ~0], np.int32)], 2), [0], [0, -1])


def test_steps_that_say_nothing() -> None:
    assert KeptIds.of_steps([], 4) is None
    assert KeptIds.of_steps([np.array([], np.int32)] * 2, 2) is None
    assert KeptIds.of_steps([np.array([3, 1], np.int32)], 3) is None
    assert KeptIds.of_steps([np.array([0, 1], np.int32)], 0) is None


def test_the_first_tokens() -> None:
    whole = kept([5, 7, 3, 9], [2, 0, -1, 1])
    check(whole.first(3), [5, 7, 3], [2, 0, -1])
    check(whole.first(0), [], [])
    check(whole.first(9), [5, 7, 3, 9], [2, 0, -1, 1])


def test_parts_by_hand() -> None:
    one, two = kept([5, 7], [0, 2]), kept([3], [-1])
    check(KeptIds.join([one, two], [2, 1]), [5, 7, 3], [0, 2, -1])
    check(KeptIds.join([None, two], [2, 1]), [3], [0, 0, -1])
    check(KeptIds.join([one, None], [2, 3]), [5, 7], [0, 2, 0, 0, 0])
    assert KeptIds.join([None, None], [2, 1]) is None


def test_bytes() -> None:
    assert kept([5, 7, 3], [2, -1]).nbytes == 20


MASKS = st.integers(2, 9).flatmap(
    lambda words: st.lists(
        st.lists(st.booleans(), min_size=words, max_size=words).filter(any), min_size=1, max_size=8
    ).map(torch.tensor)
)


@settings(max_examples=100)
@given(mask=MASKS, data=st.data())
def test_words_named_step_by_step_are_those_of_the_mask(mask: torch.Tensor, data: st.DataObject) -> None:
    """Two answers, sampled together; then cut in two and joined."""
    tokens, words = mask.shape
    other = mask.flip(0)
    steps: list[list[np.ndarray]] = [[], []]
    for t in range(tokens):
        named = name_kept(log_probs_of(torch.stack([mask[t], other[t]])), [t, t])
        if named is None:
            continue
        for row in range(2):
            steps[row].append(named[0][named[1][row] : named[1][row + 1]])
    for said, meant in zip(steps, (mask, other), strict=True):
        whole = KeptIds.of_steps(said, tokens)
        if bool(meant.all()):
            assert whole is None
            continue
        assert whole is not None
        as_data = KeptTokens(ids=torch.from_numpy(whole.ids), sizes=torch.from_numpy(whole.sizes))
        as_data.validate(vocabulary=words, num_tokens=tokens)
        assert torch.equal(dense_mask(as_data.ids, as_data.sizes, words), meant)
        assert all(2 * abs(size) <= words for size in whole.sizes.tolist())
        cut = data.draw(st.integers(0, tokens))
        first = KeptIds.of_steps(said, cut)
        later = [np.array([step[0] - cut, *step[1:]], np.int32) for step in said if len(step) and step[0] >= cut]
        joined = KeptIds.join([first, KeptIds.of_steps(later, tokens - cut)], [cut, tokens - cut])
        check(joined, whole.ids.tolist(), whole.sizes.tolist())
        if first is not None:
            check(whole.first(cut), first.ids.tolist(), first.sizes.tolist())


@pytest.mark.parametrize("steps", [[[1, 5], [1, 6]], [[2, 5], [0, 6]], [[0, 5], [1]]])
def test_words_of_tokens_in_no_order_are_no_words(steps: list[list[int]]) -> None:
    with pytest.raises(EngineError, match="the engine reported kept tokens for the tokens"):
        KeptIds.of_steps([np.array(step, np.int32) for step in steps], 4)


# -- parameters --------------------------------------------------------------------------------------------------------

LEAVING = [
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"min_tokens": 2},
    {"bad_words": ["x"]},
    {"allowed_token_ids": [1]},
    {"structured_outputs": {"regex": "a"}},
]
KEEPING: list[dict[str, Any]] = [
    {},
    {"top_k": 0},
    {"top_k": -1},
    {"top_p": 1},
    {"min_p": 0.0},
    {"min_tokens": 0},
    {"bad_words": []},
    {"allowed_token_ids": None},
    {"temperature": 0.3, "max_tokens": 7, "stop": ["x"], "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("params", LEAVING)
def test_parameters_that_leave_words_out(params: dict[str, Any]) -> None:
    (name,) = params
    assert leaves_words_out(params.get) == name


@pytest.mark.parametrize("params", KEEPING)
def test_parameters_that_do_not(params: dict[str, Any]) -> None:
    assert leaves_words_out(params.get) is None
