"""Kept tokens keep their values through every container they pass; wrong ones are found and named."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack
from torch import Tensor

from support.html_table import TableReader
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
    assert got.batch_size == wanted.batch_size
    for one, other in zip(got._samples(), wanted._samples(), strict=True):
        for field in ("ids", "sizes"):
            assert getattr(one, field).dtype == getattr(other, field).dtype == torch.int32
            assert getattr(one, field).tolist() == getattr(other, field).tolist()


# masks and rows


@settings(max_examples=60)
@given(mask=MASKS, data=st.data())
def test_any_mask_comes_back_whole_and_of_some_tokens(mask: Tensor, data: st.DataObject) -> None:
    one = from_mask(mask).validate(vocabulary=mask.shape[1], num_tokens=len(mask))
    assert torch.equal(mask_of(one, mask.shape[1]), mask)
    wanted = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask))), dtype=torch.bool)
    assert torch.equal(dense_mask(*select_rows(one.ids, one.sizes, wanted), mask.shape[1]), mask[wanted])


def test_the_words_of_a_token_and_masks_by_hand() -> None:
    one, whole = by_hand(), [0, 1, 2, 3, 4]
    assert mask_of(one).int().tolist() == MASK
    assert mask_of(kept([4, 2, 1, -1, -1], [0, 2, 0, -1])).int().tolist() == MASK  # what is behind is a pad
    assert mask_of(kept([], [0, 0]), 2).all() and mask_of(kept([], []), 2).shape == (0, 2)
    assert [one.ids_of(t, vocabulary=V).tolist() for t in range(4)] == [whole, [2, 4], whole, [0, 2, 3, 4]]
    assert one.ids_of(-3, vocabulary=V).tolist() == [2, 4]
    for token in (True, None, 4, -5, 1.0, "a"):
        with pytest.raises(ValueError, match=r"^token must be"):
            one.ids_of(token, vocabulary=V)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="index the batch first"):
        lazy_stack([one, one]).ids_of(1, vocabulary=V)
    # sizes of int8 do not wrap
    one = KeptTokens(ids=torch.arange(128), sizes=torch.tensor([-128], dtype=torch.int8)).validate(vocabulary=200)
    assert one.ids_of(0, vocabulary=130).tolist() == [128, 129]


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
        (kept([5], [1]), {}, "ids of kept must be in 0..4, got 5."),
        (kept([-1], [1]), {}, "ids of kept must be in 0..4, got -1."),
        (kept([2, 2], [2]), {}, "a token of kept lists an id twice."),
        (by_hand(), {"num_tokens": 3}, "kept must have 3 rows, got 4."),
        (by_hand(), {"tokens": torch.zeros(3).long()}, "kept must have 3 rows, got 4."),
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


@settings(max_examples=40)
@given(mask=MASKS, data=st.data())
def test_turns_joined_have_the_masks_of_both(mask: Tensor, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(mask)))
    words = mask.shape[1]
    later = mask.clone()
    later[:cut] = data.draw(st.sampled_from([True, False])) | mask[:cut].flip(1)
    first = from_mask(mask[:cut]) if cut else kept([], [])
    if data.draw(st.booleans()):  # a pad stands behind its ids
        first = kept([*first.ids.tolist(), -1], first.sizes.tolist())
    joined = first.followed_by(from_mask(later)).validate(vocabulary=words, num_tokens=len(mask))
    assert torch.equal(mask_of(joined, words), mask)


def test_padding_by_hand() -> None:
    both = lazy_stack([by_hand(), kept([3], [0, 1])])
    left, right = both.pad(), both.pad(5, "right")
    assert left.batch_size == (2,) and left.sizes.tolist() == [[0, 2, 0, -1], [0, 0, 0, 1]]
    assert left.ids.tolist() == [[4, 2, 1], [3, -1, -1]]
    assert (left.ids.dtype, left.sizes.dtype) == (torch.int32, torch.int32)
    assert right.sizes.tolist() == [[0, 2, 0, -1, 0], [0, 1, 0, 0, 0]]
    assert mask_of(right[1]).int().tolist() == [[1] * 5, [0, 0, 0, 1, 0], *[[1] * 5] * 3]
    assert_same(by_hand().pad(5)[...], kept([4, 2, 1], [0, 0, 2, 0, -1]))
    nested = lazy_stack([both, both]).pad()
    assert nested.batch_size == (2, 2)
    assert_same(nested[1], left)
    nothing = lazy_stack([by_hand(), by_hand()]).pad()[:0]
    assert nothing.pad(7).sizes.shape == (0, 7) and nothing.nbytes == 0
    none = both[:0].pad()
    assert (both[:0].pad(7).sizes.shape, none.sizes.shape, none.ids.dtype) == ((0, 7), (0, 0), torch.int32)


def test_what_cannot_be_cut_joined_or_padded() -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        by_hand().truncate(0)
    with pytest.raises(ValueError, match="a later turn repeats 4 tokens, and has 1"):
        by_hand().followed_by(kept([], [0]))
    one, several = by_hand(), lazy_stack([by_hand()])
    for first, later in ((one, several), (several, one)):
        with pytest.raises(ValueError, match="turns are joined one sample at a time"):
            first.followed_by(later)
    with pytest.raises(ValueError, match=r"cannot pad to 3 tokens, the longest sample has 4: truncate\(\) first"):
        by_hand().pad(3)
    with pytest.raises(ValueError, match="side must be 'left' or 'right', got 'middle'"):
        by_hand().pad(6, "middle")  # type: ignore[arg-type]


def test_how_it_looks() -> None:
    assert repr(by_hand()) == "KeptTokens(shape=[T=4], tokens with ids cut off=2, ids=3, nbytes=28)"
    both = lazy_stack([by_hand(), kept([3], [0, 1])])
    assert repr(both) == "KeptTokens(shape=[2, T=2..4], tokens with ids cut off=3, ids=4, nbytes=40)"
    assert repr(both.pad()).startswith("KeptTokens(shape=[2, T=4], tokens with ids cut off=3, ids=4, nbytes=56")
    assert repr(by_hand().empty()) == repr(by_hand().to("meta")) == "KeptTokens(batch_size=[])"
    # in a notebook, numbers of words are a table
    two = lazy_stack([by_hand(), by_hand()])
    for words, times in ((by_hand(), 1), (two, 2), (two.pad(), 2)):
        read, rows = TableReader(words._repr_html_()), {"2 to 4 entries": 1, "all but some": 1, "all": 2}
        assert read.rows["tbody"] == [[label, str(count * times)] for label, count in rows.items()]
        assert read.other[0] == repr(words)
    # what cannot be read is shown too
    meta = KeptTokens(ids=torch.zeros(2, device="meta"), sizes=torch.zeros(2, device="meta"))
    assert TableReader(meta._repr_html_()).other == [repr(meta)]
    assert TableReader(KeptTokens(ids=torch.zeros(0), sizes=None)._repr_html_()).rows["tbody"] == []


def test_a_count_is_an_integer_of_any_kind() -> None:
    made = kept([1], [0, 1])
    assert made.pad(np.int64(3)).sizes.tolist() == [0, 0, 1]
    assert made.validate(vocabulary=np.int32(V), num_tokens=np.int64(2)) is made
    assert kept([], [0]).ids_of(0, vocabulary=1).tolist() == [0]
    for value in (1.5, True, "3", float("nan"), -1, 2**31):
        for name, call in (
            ("length", made.pad),
            ("num_tokens", made.truncate),
            ("num_tokens", lambda value: made.validate(vocabulary=V, num_tokens=value)),
            ("vocabulary", lambda value: made.validate(vocabulary=value)),
            ("vocabulary", lambda value: made.ids_of(0, vocabulary=value)),
        ):
            if (name, value) != ("num_tokens", 2**31):
                with pytest.raises(ValueError, match=f"{name} must be "):
                    call(value)
