"""The tensors of a scoring pass, by hand: layouts, masks, and what a row of logits says about which token."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from torchrl_moe.modules.policies.scoring import align, read_batch, token_scores

TOKENS, MASK = ("tokens", "full"), ("masks", "all_attention_mask")


def sample(ids: list[int], mask: list[int] | None = None) -> TensorDict:
    td = TensorDict({"tokens": {"full": torch.tensor(ids)}})
    if mask is not None:
        td["masks"] = {"all_attention_mask": torch.tensor(mask).bool()}
    return td


def ragged() -> TensorDictBase:
    return lazy_stack([sample([5, 6], [1, 1]), sample([7, 8, 9, 10], [1, 1, 1, 1])])


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


def test_a_row_of_logits_is_of_the_next_token_and_half_precision_is_scored_in_single() -> None:
    aligned = align(torch.cat([LOGITS, torch.full((1, 2), 9.0)])[None], torch.tensor([0.5]))
    torch.testing.assert_close(aligned[0], torch.tensor([[0.0, 0.0], [0.0, 0.0], [2 * math.log(3.0), 0.0]]))
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    log_probs, _ = token_scores(logits, torch.tensor([1, 2, 3]), 0.7, False)
    assert log_probs.dtype == align(logits[None], torch.tensor([0.7])).dtype == torch.float32
    wanted = (logits.double() / 0.7).log_softmax(-1)[[0, 1, 2], [1, 2, 3]]
    torch.testing.assert_close(log_probs.double(), wanted, atol=1e-6, rtol=0)
