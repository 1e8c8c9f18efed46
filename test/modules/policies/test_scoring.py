"""The tensors of a scoring pass, by hand: layouts, masks, and what a row of logits says about which token."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from torchrl_moe.modules.policies.scoring import align, read_batch, read_rows, token_scores

TOKENS, MASK = ("tokens", "full"), ("masks", "all_attention_mask")


def sample(ids: list[int], mask: list[int] | None = None) -> TensorDict:
    td = TensorDict({"tokens": {"full": torch.tensor(ids)}})
    if mask is not None:
        td["masks"] = {"all_attention_mask": torch.tensor(mask).bool()}
    return td


def ragged() -> TensorDictBase:
    return lazy_stack([sample([5, 6], [1, 1]), sample([7, 8, 9, 10], [1, 1, 1, 1])])


def dense() -> TensorDictBase:
    """Pads, which are ids like any other, on both sides."""
    rows = [([9, 5, 6, 9], [0, 1, 1, 0]), ([7, 8, 1, 2], [1, 1, 1, 1])]
    return torch.stack([sample(*row) for row in rows])


def test_ragged_rows_are_padded_on_the_left_and_positions_start_at_each_sequence() -> None:
    batch = read_batch(ragged(), TOKENS, MASK)
    assert batch.ids.tolist() == [[0, 0, 5, 6], [7, 8, 9, 10]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert batch.lengths == (2, 4)
    assert batch.scored.int().tolist() == [[0, 0, 0, 1], [0, 1, 1, 1]]
    assert [row.tolist() for row in batch.split(batch.ids)] == [[5, 6], [7, 8, 9, 10]]
    batch = read_batch(ragged(), TOKENS, MASK)
    assert batch.padded().inputs["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    packed = batch.packed().inputs
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert packed["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]]
    assert packed.keys() == {"input_ids", "position_ids"}  # a mask would hide where sequences begin


def test_dense_rows_keep_their_own_pads() -> None:
    batch = read_batch(dense(), TOKENS, MASK)
    assert batch.ids.tolist() == [[9, 5, 6, 9], [7, 8, 1, 2]]
    assert batch.lengths == (4, 4)
    assert batch.scored.int().tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    padded = batch.padded()  # the model's input is padded on the right
    assert padded.inputs["input_ids"].tolist() == [[5, 6, 0, 0], [7, 8, 1, 2]]
    assert padded.inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert padded.inputs["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert padded.index[0, 1:3].tolist() == [0, 1]
    td = lazy_stack([sample([9, 5, 6, 9], [0, 1, 1, 0]), sample([9, 9, 7, 9], [0, 0, 1, 0])])
    padded = read_batch(td, TOKENS, MASK).padded()
    assert padded.inputs["input_ids"].tolist() == [[5, 6], [7, 0]]
    nothing = read_batch(lazy_stack([sample([9, 9], [0, 0])]), TOKENS, MASK).padded()
    assert nothing.inputs["attention_mask"].tolist() == [[0]]


def test_sequences_share_rows_where_they_fit() -> None:
    """Lengths 1, 4, 2, 1 in rows of 4: the longest first, and each where there is room."""
    ids = [[1], [2, 3, 4, 5], [6, 7], [8]]
    packed = read_batch(lazy_stack([sample(row) for row in ids]), TOKENS, MASK).packed(4)
    assert packed.inputs["input_ids"].tolist() == [[2, 3, 4, 5], [6, 7, 1, 8]]
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert packed.index[:, -1].tolist() == [6, 3, 5, 7]
    rest = read_batch(lazy_stack([sample(row) for row in ids[1:]]), TOKENS, MASK).packed(4)
    assert rest.inputs["input_ids"].tolist() == [[2, 3, 4, 5], [6, 7, 8, 0]]
    assert rest.inputs["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]  # the pad is no part of a sequence


@pytest.mark.parametrize("td", [ragged(), dense()])
@pytest.mark.parametrize("width", [None, 4, 5])
@pytest.mark.parametrize("trailing", [(), (2,), (2, 3)])
def test_reading_finds_every_token_with_gradients(
    td: TensorDictBase, width: int | None, trailing: tuple[int, ...]
) -> None:
    batch = read_batch(td, TOKENS, MASK)
    for layout in (batch.padded(), batch.packed(width)):
        assert torch.equal(layout.read(layout.inputs["input_ids"].flatten()), batch.ids.masked_fill(~batch.mask, 0))
        used = torch.zeros(layout.shape.numel(), dtype=torch.bool)
        used[layout.index[batch.mask]] = True
        assert used.sum() == batch.mask.sum()
        values = torch.randn(2, 4, *trailing)
        placed = torch.full((layout.shape.numel(), *trailing), 7.0)
        placed[layout.index[batch.mask]] = values[batch.mask]
        placed.requires_grad_()
        out = layout.read(placed)
        assert torch.equal(out[batch.mask], values[batch.mask])
        assert not out[~batch.mask].any()
        out.sum().backward()
        assert not placed.grad[~used].any()
        assert (placed.grad[used] == 1).all()


@pytest.mark.parametrize(
    ("td", "shape"),
    [
        (sample([5, 6]), r"\[\]"),
        (lazy_stack([ragged(), ragged()]), r"\[2, 2\]"),
        (TensorDict(batch_size=[0]), r"\[0\]"),
    ],
)
def test_another_batch_size_is_refused(td: TensorDictBase, shape: str) -> None:
    with pytest.raises(ValueError, match=rf"batch size \[B\] with B >= 1, got {shape}: use td.reshape"):
        read_batch(td, TOKENS, MASK)


def test_a_gap_in_the_mask_is_refused() -> None:
    """The token behind it had log-prob 0, as if it were certain, and the loss counted it."""
    td = lazy_stack([sample([5, 6], [1, 1]), sample([7, 8, 9, 1], [1, 0, 0, 1]), sample([7, 8, 9], [1, 0, 1])])
    with pytest.raises(ValueError, match=r"'all_attention_mask'\) of sample 1 has a gap before token 3 \(2 gaps in"):
        read_batch(td, TOKENS, MASK)
    with pytest.raises(ValueError, match=r"of sample 0 has a gap before token 2 \(1 gaps in the batch\): pads stand"):
        read_batch(td[2:], TOKENS, MASK)


def test_what_is_missing_of_another_length_or_no_integer_is_named() -> None:
    with pytest.raises(KeyError, match=r"in every sample; the first one has .*full") as error:
        read_batch(ragged(), ("tokens", "ids"), MASK)
    assert error.value.args[0].startswith("no ('tokens', 'ids') in every sample")
    with pytest.raises(KeyError, match=r"in every sample; the first one has .*all_attention_mask"):
        read_batch(lazy_stack([sample([5], [1]), sample([5])]), MASK, TOKENS)
    td = lazy_stack([sample([5, 6, 7], [1, 1]), sample([7, 8, 9, 10], [1, 1, 1, 1])])
    with pytest.raises(ValueError, match=r"'all_attention_mask'\) of sample 0 has 2 rows, its tokens are 3"):
        read_batch(td, TOKENS, MASK)
    td = lazy_stack([sample([5, 6])])
    td[TOKENS] = td[TOKENS].float()
    with pytest.raises(ValueError, match=r"\('tokens', 'full'\) of sample 0"):
        read_batch(td, TOKENS, MASK)


def test_rows_are_read_with_their_trailing_dimensions() -> None:
    td = ragged()
    for i, one in enumerate(td.unbind(0)):
        one["x"] = torch.full((len(one[TOKENS]), 2), i)
    assert read_rows(td, "x", -1)[0].tolist() == [[-1, -1], [-1, -1], [0, 0], [0, 0]]
    assert read_rows(td, "y", -1) is None
    with pytest.raises(ValueError, match="'x' of sample 1 has 4 rows, its tokens are 3"):
        read_rows(td, "x", -1, (2, 3))
    del td[0]["x"]
    assert read_rows(td, "x", -1) is None


LOGITS = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
"""Once both words are as likely, once word 0 is three times as likely."""


def test_tokens_are_scored_by_the_logits_of_their_row_at_their_temperature() -> None:
    log_probs, entropy = token_scores(LOGITS, torch.tensor([1, 1]), 1.0, True)
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.5), math.log(0.25)]))
    spread = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2.0), spread]))
    assert token_scores(LOGITS, torch.tensor([1, 1]), 1.0, False)[1] is None
    log_probs, _ = token_scores(LOGITS, torch.tensor([1, 0]), 0.5, False)
    torch.testing.assert_close(log_probs[1], torch.tensor(math.log(0.9)))  # odds of 3 become 9
    rows = LOGITS[1].expand(3, -1)  # odds of 3
    log_probs, entropy = token_scores(rows, torch.tensor([0, 0, 1]), torch.tensor([1.0, 0.5, 0.5]), True)
    torch.testing.assert_close(log_probs, torch.tensor([0.75, 0.9, 0.1]).log())
    assert entropy[1] == entropy[2] < entropy[0]


def test_tokens_are_scored_over_the_words_that_were_kept() -> None:
    """Of words that are 1 : 2 : 5."""
    logits = torch.tensor([1.0, 2.0, 5.0]).log().expand(4, -1).clone().requires_grad_()
    kept = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 1], [0, 1, 1]]).bool()
    log_probs, entropy = token_scores(logits, torch.tensor([0, 0, 2, 1]), 1.0, True, kept)
    torch.testing.assert_close(log_probs, torch.tensor([1 / 3, 1 / 8, 1.0, 2 / 7]).log())
    spread = [torch.tensor(p) for p in ([1 / 3, 2 / 3], [1 / 8, 1 / 4, 5 / 8], [1.0], [2 / 7, 5 / 7])]
    torch.testing.assert_close(entropy, torch.stack([-(p * p.log()).sum() for p in spread]))
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[~kept].any()
    logits = torch.tensor([[1.0, 2.0, 5.0]] * 2).log()
    kept = torch.tensor([[1, 1, 0]] * 2).bool()
    log_probs, _ = token_scores(logits, torch.tensor([0, 0]), torch.tensor([1.0, 0.5]), False, kept)
    torch.testing.assert_close(log_probs, torch.tensor([1 / 3, 1 / 5]).log())


def test_a_row_of_logits_is_of_the_next_token_and_half_precision_is_scored_in_single() -> None:
    aligned = align(torch.cat([LOGITS, torch.full((1, 2), 9.0)])[None], torch.tensor([0.5]))
    torch.testing.assert_close(aligned[0], torch.tensor([[0.0, 0.0], [0.0, 0.0], [2 * math.log(3.0), 0.0]]))
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    log_probs, _ = token_scores(logits, torch.tensor([1, 2, 3]), 0.7, False)
    assert log_probs.dtype == align(logits[None], torch.tensor([0.7])).dtype == torch.float32
    wanted = (logits.double() / 0.7).log_softmax(-1)[[0, 1, 2], [1, 2, 3]]
    torch.testing.assert_close(log_probs.double(), wanted, atol=1e-6, rtol=0)
