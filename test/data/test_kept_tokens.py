"""Kept tokens keep their values through every container they pass; wrong ones are found and named."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from support.html_table import TableReader
from support.saved import SAVED
from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import dense_mask, select_rows

V = 5
MASK = [[1, 1, 1, 1, 1], [0, 0, 1, 0, 1], [1, 1, 1, 1, 1], [1, 0, 1, 1, 1]]
"""Of the tokens of :func:`by_hand`."""


def kept(ids: list[int], sizes: list[int]) -> KeptTokens:
    return KeptTokens(ids=torch.tensor(ids, dtype=torch.int32), sizes=torch.tensor(sizes, dtype=torch.int32))


def by_hand() -> KeptTokens:
    """All words, words 4 and 2, all words, all but word 1."""
    return kept([4, 2, 1], [0, 2, 0, -1])


def mask_of(one: KeptTokens, vocabulary: int = V) -> Tensor:
    return dense_mask(one.ids, one.sizes, vocabulary)


def from_mask(mask: Tensor) -> KeptTokens:
    """Said word by word; a row of which more than half is kept says what is not."""
    ids: list[int] = []
    sizes = []
    for row in mask.tolist():
        inside = [word for word, is_kept in enumerate(row) if is_kept]
        outside = [word for word, is_kept in enumerate(row) if not is_kept]
        shorter = inside if len(inside) <= len(outside) else outside
        ids += shorter
        sizes.append(len(inside) if shorter is inside else -len(outside))
    return kept(ids, sizes)


MASKS = st.integers(1, 6).flatmap(
    lambda words: st.lists(
        st.lists(st.booleans(), min_size=words, max_size=words).filter(any), min_size=1, max_size=6
    ).map(torch.tensor)
)


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is KeptTokens
    assert got.batch_size == wanted.batch_size
    for one, other in zip(got._samples(), wanted._samples(), strict=True):
        for field in ("ids", "sizes"):
            assert getattr(one, field).dtype == getattr(other, field).dtype == torch.int32
            assert getattr(one, field).tolist() == getattr(other, field).tolist()


# masks and rows


def test_a_mask_by_hand() -> None:
    assert mask_of(by_hand()).int().tolist() == MASK
    assert mask_of(kept([4, 2, 1, -1, -1], [0, 2, 0, -1])).int().tolist() == MASK  # what is behind is a pad
    assert mask_of(kept([], [0, 0]), 2).all() and mask_of(kept([], []), 2).shape == (0, 2)


@settings(max_examples=60)
@given(mask=MASKS, data=st.data())
def test_any_mask_comes_back_whole_and_of_some_tokens(mask: Tensor, data: st.DataObject) -> None:
    one = from_mask(mask).validate(vocabulary=mask.shape[1], num_tokens=len(mask))
    assert torch.equal(mask_of(one, mask.shape[1]), mask)
    wanted = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask))), dtype=torch.bool)
    assert torch.equal(dense_mask(*select_rows(one.ids, one.sizes, wanted), mask.shape[1]), mask[wanted])


def test_the_words_of_a_token() -> None:
    one = by_hand()
    assert [one.ids_of(t, vocabulary=V).tolist() for t in range(4)] == [
        [0, 1, 2, 3, 4], [2, 4], [0, 1, 2, 3, 4], [0, 2, 3, 4],
    ]  # fmt: skip
    assert one.ids_of(-3, vocabulary=V).tolist() == [2, 4]


# validate


def test_right_words_pass_in_every_form() -> None:
    tokens = torch.tensor([3, 4, 0, 0])
    assert by_hand().validate(vocabulary=V, num_tokens=4, tokens=tokens).sizes.tolist() == [0, 2, 0, -1]
    lazy_stack([by_hand(), kept([], [0])]).validate(vocabulary=V)
    kept([2, 2], [1, -1]).validate(vocabulary=V)  # once for each token
    padded = lazy_stack([by_hand(), kept([], [0])]).pad()
    padded.validate(vocabulary=V, num_tokens=4, tokens=torch.stack([tokens, tokens]))
    padded.unsqueeze(0).validate(vocabulary=V, num_tokens=4, tokens=torch.stack([tokens, tokens])[None])


@pytest.mark.parametrize(
    ("one", "arguments", "text"),
    [
        (kept([4, 2], [0, 2, 0, -1]), {}, "the sizes of kept say 3 ids, and there are 2"),
        (kept([4, 2, 1], [0, 2]), {}, "the sizes of kept say 2 ids, and there are 3"),
        (kept([5], [1]), {}, "ids of kept must be in 0..4, got 5."),
        (kept([-1], [1]), {}, "ids of kept must be in 0..4, got -1."),
        (kept([2, 2], [2]), {}, "a token of kept lists an id twice."),
        (by_hand(), {"num_tokens": 3}, "kept must have 3 rows, got 4."),
        (by_hand(), {"tokens": torch.zeros(3).long()}, "kept must have 3 rows, got 4."),
        (by_hand(), {"tokens": torch.tensor([0, 3, 0, 0])}, "token 1 of kept, 3, is not among the ids"),
        (by_hand(), {"tokens": torch.tensor([0, 4, 0, 1])}, "token 3 of kept, 1, is not among the ids"),
        # it would fall on token 3's place: 1 * 5 + 14 = 3 * 5 + 4
        (by_hand(), {"tokens": torch.tensor([0, 14, 0, 0])}, "token 1 of kept must be in 0..4, got 14."),
        (by_hand(), {"tokens": torch.tensor([9, 4, -1, -1])}, "token 3 of kept must be in 0..4, got -1."),
        (kept([3], [-128]), {}, "token 0 of kept has nothing left to be sampled from"),
        (kept([*range(V)], [0, -V]), {}, "token 1 of kept has nothing left to be sampled from: all 5 ids are cut off"),
        (KeptTokens(ids=torch.zeros(1, 1).int(), sizes=torch.ones(1).int()), {}, "ids of kept must have 1 dim"),
        (KeptTokens(ids=torch.zeros(1), sizes=torch.ones(1).int()), {}, "ids of kept must "),
        (KeptTokens(ids=torch.zeros(1).int(), sizes=torch.ones(1)), {}, "sizes of kept must "),
        (lazy_stack([kept([0], [1]), kept([5], [1])]), {}, "ids of kept of sample 1 must be in 0..4, got 5."),
    ],
)
def test_wrong_ids_are_named(one: KeptTokens, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        one.validate(vocabulary=V, **arguments)


# cut, joined and padded


def test_the_first_tokens() -> None:
    assert_same(by_hand().truncate(2), kept([4, 2], [0, 2]))
    assert_same(by_hand().truncate(9), by_hand())
    both = lazy_stack([by_hand(), kept([3], [0, 1])])
    assert_same(both.truncate(1), lazy_stack([kept([], [0]), kept([], [0])]))
    assert_same(both.pad().truncate(3), lazy_stack([kept([4, 2], [0, 2, 0]), kept([], [0, 0, 0])]))


def test_turns_by_hand() -> None:
    first = kept([4, 2], [0, 2])
    later = kept([0, 3], [0, 0, 0, -2])
    assert_same(first.followed_by(later), kept([4, 2, 0, 3], [0, 2, 0, -2]))
    assert_same(kept([], [0, 0]).followed_by(later), later)
    assert_same(first.followed_by(kept([], [0, 0, 0])), kept([4, 2], [0, 2, 0]))
    assert_same(first.followed_by(kept([1, 3], [1, 1])), first)  # what is known of the first tokens stays
    assert_same(kept([4, 2, -1], [0, 2]).followed_by(later), kept([4, 2, 0, 3], [0, 2, 0, -2]))


@settings(max_examples=40)
@given(mask=MASKS, data=st.data())
def test_turns_joined_have_the_masks_of_both(mask: Tensor, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(mask)))
    words = mask.shape[1]
    later = mask.clone()
    later[:cut] = data.draw(st.sampled_from([True, False])) | mask[:cut].flip(1)
    first = from_mask(mask[:cut]) if cut else kept([], [])
    joined = first.followed_by(from_mask(later)).validate(vocabulary=words, num_tokens=len(mask))
    assert torch.equal(mask_of(joined, words), mask)


def test_padding_by_hand() -> None:
    both = lazy_stack([by_hand(), kept([3], [0, 1])])
    left = both.pad()
    assert left.batch_size == (2,) and left.sizes.tolist() == [[0, 2, 0, -1], [0, 0, 0, 1]]
    assert left.ids.tolist() == [[4, 2, 1], [3, -1, -1]]
    assert (left.ids.dtype, left.sizes.dtype) == (torch.int32, torch.int32)
    right = both.pad(5, "right")
    assert right.sizes.tolist() == [[0, 2, 0, -1, 0], [0, 1, 0, 0, 0]]
    assert mask_of(right[1]).int().tolist() == [[1] * 5, [0, 0, 0, 1, 0], *[[1] * 5] * 3]
    assert_same(by_hand().pad(5)[...], kept([4, 2, 1], [0, 0, 2, 0, -1]))
    nested = lazy_stack([both, both]).pad()
    assert nested.batch_size == (2, 2)
    assert_same(nested[1], left)


def test_no_samples_are_padded_too() -> None:
    nothing = lazy_stack([by_hand(), by_hand()]).pad()[:0]
    assert nothing.pad(7).sizes.shape == (0, 7) and nothing.nbytes == 0
    ragged = lazy_stack([by_hand(), kept([], [0])])[:0]
    assert (ragged.pad(7).sizes.shape, ragged.pad().ids.dtype) == ((0, 7), torch.int32)


@pytest.mark.parametrize("token", [True, None, 4, -5, 1.0, "a"])
def test_the_words_of_no_token(token: Any) -> None:
    with pytest.raises(ValueError, match=r"^token must be"):
        by_hand().ids_of(token, vocabulary=V)
    with pytest.raises(ValueError, match="index the batch first"):
        lazy_stack([by_hand(), by_hand()]).ids_of(1, vocabulary=V)


def test_sizes_of_int8_do_not_wrap() -> None:
    one = KeptTokens(ids=torch.arange(128), sizes=torch.tensor([-128], dtype=torch.int8)).validate(vocabulary=200)
    assert one.ids_of(0, vocabulary=130).tolist() == [128, 129]


def test_what_cannot_be_cut_joined_or_padded() -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        by_hand().truncate(0)
    with pytest.raises(ValueError, match="a later turn repeats 4 tokens, and has 1"):
        by_hand().followed_by(kept([], [0]))
    with pytest.raises(ValueError, match="turns are joined one sample at a time"):
        lazy_stack([by_hand()]).followed_by(lazy_stack([by_hand()]))
    with pytest.raises(ValueError, match=r"cannot pad to 3 tokens, the longest sample has 4: truncate\(\) first"):
        by_hand().pad(3)
    with pytest.raises(ValueError, match="side must be 'left' or 'right', got 'middle'"):
        by_hand().pad(6, "middle")  # type: ignore[arg-type]


def test_how_it_looks() -> None:
    assert repr(by_hand()) == "KeptTokens(shape=[T=4], tokens with ids cut off=2, ids=3, nbytes=28)"
    both = lazy_stack([by_hand(), kept([3], [0, 1])])
    assert repr(both) == "KeptTokens(shape=[2, T=2..4], tokens with ids cut off=3, ids=4, nbytes=40)"
    assert repr(both.pad()).startswith("KeptTokens(shape=[2, T=4], tokens with ids cut off=3, ids=4, nbytes=56")
    assert repr(by_hand().empty()) == "KeptTokens(batch_size=[])"
    assert repr(by_hand().to("meta")) == "KeptTokens(batch_size=[])"
    assert str(KeptTokens.__doc__).startswith("The token ids that each token was sampled from")


# containers


def rollout(one: KeptTokens) -> TensorDict:
    """As the policy writes it."""
    sampling = TensorDict(temperature=torch.tensor(0.5), kept=one)
    return TensorDict(sampling=sampling, tokens=torch.arange(len(one.sizes)), finish_reason="stop")


KEPT = ("sampling", "kept")


@pytest.mark.parametrize("save", SAVED, ids=["pickle", "clone", "to", "memmap"])
@pytest.mark.parametrize("form", ["single", "dense", "ragged"])
def test_saved_words_come_back(save: Callable[[Any, Path], Any], form: str, tmp_path: Path) -> None:
    ragged = lazy_stack([by_hand(), kept([3], [0, 1])])
    words = {"single": by_hand(), "dense": ragged.pad(), "ragged": ragged}[form]
    assert_same(save(words, tmp_path / "alone"), words)
    data = rollout(words) if form == "single" else lazy_stack([rollout(one) for one in words.unbind(0)])
    loaded = save(data, tmp_path / "nested")
    assert_same(loaded[KEPT], words)
    assert loaded["sampling", "temperature"].unique().tolist() == [0.5]
    loaded[KEPT].validate(vocabulary=V)


def test_samples_without_words_left_out_stand_beside_others() -> None:
    plain = rollout(by_hand())
    del plain[KEPT]
    data = lazy_stack([plain, rollout(by_hand())])
    assert data[0].get(KEPT, None) is None
    assert_same(data[1][KEPT], by_hand())
    assert_same(pickle.loads(pickle.dumps(data))[1][KEPT], by_hand())


def test_a_replay_buffer(tmp_path: Path) -> None:
    from torchrl.data import LazyStackStorage, ReplayBuffer

    assert_same(KeptTokens.from_tensordict(by_hand().to_tensordict()), by_hand())
    words = [by_hand(), kept([3], [0, 1]), kept([], [0])]
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=8)
    buffer.extend(lazy_stack([rollout(one) for one in words[:2]]))
    buffer.add(rollout(words[2]))
    assert_same(buffer[:][KEPT], lazy_stack(words))
    drawn = buffer.sample()[KEPT].validate(vocabulary=V)
    assert {len(one.sizes) for one in drawn.unbind(0)} <= {1, 2, 4}
    buffer[:].memmap(tmp_path)
    loaded = ReplayBuffer(storage=LazyStackStorage(10), batch_size=8)
    loaded.extend(TensorDict.load_memmap(tmp_path))
    assert_same(loaded[:][KEPT], lazy_stack(words))
    assert_same(pickle.loads(pickle.dumps(buffer))[:][KEPT], lazy_stack(words))


def test_in_a_notebook_numbers_of_words_are_a_table() -> None:
    rows = [["2 to 4 entries", "1"], ["all but some", "1"], ["all", "2"]]
    two = lazy_stack([by_hand(), by_hand()])
    for words, times in ((by_hand(), 1), (two, 2), (two.pad(), 2)):
        read = TableReader(words._repr_html_())
        assert read.rows["tbody"] == [[label, str(int(count) * times)] for label, count in rows]
        assert read.other[0] == repr(words)
    # what cannot be read is shown too
    meta = KeptTokens(ids=torch.zeros(2, device="meta"), sizes=torch.zeros(2, device="meta"))
    assert TableReader(meta._repr_html_()).other == [repr(meta)]
    assert TableReader(KeptTokens(ids=torch.zeros(0), sizes=None)._repr_html_()).rows["tbody"] == []


@pytest.mark.parametrize("value", [1.5, True, "3", None, float("nan"), 2**40, -1])
def test_a_count_is_an_integer_of_any_kind(value: Any) -> None:
    made = kept([1], [0, 1])
    assert made.pad(np.int64(3)).sizes.tolist() == [0, 0, 1]
    assert made.validate(vocabulary=np.int32(V), num_tokens=np.int64(2)) is made
    calls: dict[str, Callable[[], Any]] = {
        "length": lambda: made.pad(value),
        "num_tokens": lambda: made.truncate(value),
        "vocabulary": lambda: made.validate(vocabulary=value),
    }
    for name, call in calls.items():
        if (name, value) in (("length", None), ("num_tokens", 2**40)):
            call()
        else:
            with pytest.raises(ValueError, match=f"{name} must be "):
                call()
