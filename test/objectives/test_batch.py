"""Tensors come out aligned on the last token, the masks select what they say, and what does not fit is named."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from support.rollouts import PAD, dense, ragged, sample, samples
from torchrl_moe.objectives.batch import Masking, TokenBatch, TokenReader

FULL = ("tokens", "full")
PROMPT, ATTENTION, ASSISTANT = ("tokens", "prompt"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
LOG_PROBS, REF = ("log_probs", "full"), ("next", "ref_log_probs", "full")
ROLLOUTS = samples([(2, 2), (1, 1)])
X, _ = True, False


def reader(td: TensorDictBase | None = None) -> TokenReader:
    return TokenReader(ragged(ROLLOUTS) if td is None else td, FULL)


def mask(td: TensorDictBase, masking: Masking) -> list[list[bool]]:
    return reader(td).mask(masking, PROMPT, ATTENTION, ASSISTANT).tolist()


def changed(key: Any, value: Any, at: int = 1) -> TensorDictBase:
    """The rollouts with one entry of one sample replaced, or removed (``None``)."""
    rollouts = [rollout.clone() for rollout in ROLLOUTS]
    if value is None:
        del rollouts[at][key]
    else:
        rollouts[at][key] = value
    return lazy_stack(rollouts)


def test_ragged_samples_end_in_one_column() -> None:
    tokens = [rollout[FULL].tolist() for rollout in ROLLOUTS]
    assert reader().tokens.tolist() == [tokens[0], [0, 0, *tokens[1]]]
    assert reader().lengths == [4, 2]
    values = reader().per_token(REF, "x", fill=-9.0)
    assert values[1].tolist() == [-9.0, -9.0, *ROLLOUTS[1][REF].tolist()]


def test_a_dense_batch_keeps_its_pads() -> None:
    tokens = [rollout[FULL].tolist() for rollout in ROLLOUTS]
    td = dense(ROLLOUTS, left=1, right=1)
    assert reader(td).tokens.tolist() == [[PAD, *tokens[0], PAD], [PAD, PAD, *tokens[1], PAD, PAD]]


def test_masks_of_ragged_samples() -> None:
    td = ragged(ROLLOUTS)
    assert mask(td, "sft") == [[_, _, X, X], [_, _, _, X]]
    assert mask(td, "rlhf") == [[_, _, X, X], [_, _, _, X]]
    assert mask(td, "generic") == [[X, X, X, X], [_, _, X, X]]


def test_masks_of_a_dense_batch() -> None:
    td = dense(ROLLOUTS, left=1, right=1)
    assert mask(td, "sft") == [[_, _, _, X, X, _], [_, _, _, X, _, _]]
    assert mask(td, "rlhf") == [[_, _, _, X, X, _], [_, _, _, X, _, _]]
    assert mask(td, "generic") == [[_, X, X, X, X, _], [_, _, X, X, _, _]]


def test_padded_samples_of_different_widths_in_one_stack() -> None:
    narrow, wide = dense(ROLLOUTS[1:], left=0, right=1)[0], dense(ROLLOUTS[:1], left=2, right=0)[0]
    assert mask(lazy_stack([narrow, wide]), "sft") == [[_, _, _, _, X, _], [_, _, _, _, X, X]]


def test_rlhf_sees_every_turn_and_sft_only_the_last() -> None:
    turns = torch.tensor([_, X, _, X])
    td = changed(ASSISTANT, turns, at=0)
    assert mask(td, "rlhf")[0] == turns.tolist()
    assert mask(td, "sft")[0] == [_, _, X, X]


def test_advantages_per_sample_and_per_token_in_one_batch() -> None:
    rollouts = [sample(1, 2, advantage=torch.tensor([[3.0]])), sample(1, 1, advantage=torch.tensor([[4.0], [5.0]]))]
    assert reader(ragged(rollouts)).advantage("advantage").tolist() == [[3, 3, 3], [0, 4, 5]]
    td = dense(rollouts[:1])
    assert reader(td).advantage("advantage").tolist() == [[3, 3, 3]]
    td["advantage"] = torch.arange(3.0).view(1, 3, 1)
    assert reader(td).advantage("advantage").tolist() == [[0, 1, 2]]


def test_short_reference_rows_are_filled_on_the_side_given() -> None:
    td = changed(REF, torch.tensor([-1.0]))
    assert reader(td).ref_log_probs(REF, "left", -5.0)[1, 2:].tolist() == [-5, -1]
    assert reader(td).ref_log_probs(REF, "right", -5.0)[1, 2:].tolist() == [-1, -5]
    td = changed(REF, torch.tensor([[-1.0], [-2.0]], requires_grad=True))
    values = reader(td).ref_log_probs(REF, "left", float("nan"))
    assert values[1, 2:].tolist() == [-1, -2]
    assert not values.requires_grad


def test_totals() -> None:
    td = ragged(ROLLOUTS)
    assert reader(td).total("n") is None
    td["n"] = torch.full((2,), 7)
    total = reader(td).total("n")
    assert total is not None
    assert total.item() == 7
    stacked = TensorDict({FULL: torch.zeros(2, 3).long(), "n": torch.full((2, 1), 2.5)}, batch_size=[2])
    total = reader(stacked).total("n")
    assert total is not None
    assert total.item() == 2.5


@pytest.mark.parametrize("value", [[1, 2], [-1, -1], [float("nan")] * 2])
def test_wrong_totals_are_refused(value: list[float]) -> None:
    td = ragged(ROLLOUTS)
    td["n"] = torch.tensor(value)
    with pytest.raises(
        ValueError, match=r"^'n' must be a tensor of one finite number, 0 or more and the same for each sample, got t"
    ):
        reader(td).total("n")


def test_a_total_that_is_no_tensor_is_refused() -> None:
    td = TensorDict({FULL: torch.zeros(2, 3).long(), "n": "many"}, batch_size=[2])
    with pytest.raises(ValueError, match=r"^'n' must be a tensor of one finite number, .* got NonTensorData"):
        reader(td).total("n")


def test_a_batch_moves_to_a_device() -> None:
    ones = torch.ones(1, 2)
    batch = TokenBatch(
        tokens=ones,
        mask=ones,
        unsampled=ones,
        advantage=ones,
        sample_log_probs=ones,
        ref_log_probs=None,
        prox_log_probs=ones,
        staleness=None,
        sum_weights=None,
        num_valid_tokens=None,
        num_sequences=ones[0, 0],
    )
    moved = batch.to(torch.device("meta"))
    assert moved.mask.is_meta
    assert moved.num_sequences is not None
    assert moved.num_sequences.is_meta
    assert moved.ref_log_probs is None


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [[], [0], [2, 1]])
def test_a_wrong_batch_size_is_refused(batch_size: list[int]) -> None:
    td = TensorDict({FULL: torch.zeros(*batch_size, 3).long()}, batch_size=batch_size)
    with pytest.raises(
        ValueError, match=rf"batch size \[B\] with B >= 1, got {re.escape(str(batch_size))}: use td.resh"
    ):
        TokenReader(td, FULL)


@pytest.mark.parametrize(
    ("key", "masking", "told"),
    [
        (FULL, None, "the token ids of prompt and response"),
        (LOG_PROBS, None, "the log-probs of the policy that generated"),
        (REF, None, "the ref log-probs"),
        ("advantage", None, "the advantages"),
        (PROMPT, "sft", "the prompt's token ids .*'rlhf' uses the assistant mask instead"),
        (ATTENTION, "sft", r"the attention mask \(masking_strategy='sft'\)"),
        (ATTENTION, "generic", r"the attention mask \(masking_strategy='generic'\)"),
        (ASSISTANT, "rlhf", r"the mask of all assistant tokens \(masking_strategy='rlhf'\)"),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_missing_key_is_named(key: Any, masking: Masking | None, told: str, padded: bool) -> None:
    td = dense(ROLLOUTS) if padded else ragged(ROLLOUTS)
    del td[key]
    with pytest.raises(
        ValueError, match=rf"find {told}.*: the tensordict has no {re.escape(repr(key))}\. It has .* by set_keys\(\)"
    ):
        read_all(td, masking)


def read_all(td: TensorDictBase, masking: Masking | None = None) -> None:
    every = TokenReader(td, FULL)
    for one in get_args(Masking) if masking is None else (masking,):
        every.mask(one, PROMPT, ATTENTION, ASSISTANT)
    every.constant_log_probs(LOG_PROBS, "the policy that generated the tokens")
    every.ref_log_probs(REF, "left", 0.0)
    every.advantage("advantage")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (LOG_PROBS, torch.zeros(3), r"of sample 1 must have shape \[2\], got \[3\]. It has a value for each token"),
        (LOG_PROBS, torch.zeros(2, 1), r"of sample 1 must have shape \[2\], got \[2, 1\]"),
        (ATTENTION, torch.ones(1).bool(), r"of sample 1 must have shape \[2\], got \[1\]"),
        (ASSISTANT, torch.ones(1).bool(), r"of sample 1 must have shape \[2\], got \[1\]"),
        (REF, torch.zeros(3), r"of sample 1 must have shape \[2\], got \[3\]"),
        (REF, torch.zeros(2, 2), r"of sample 1 must have shape \[2\], got \[2, 2\]"),
        (PROMPT, torch.zeros(3).long(), r"of sample 1 has 3 tokens, got only 2 in all"),
        (
            "advantage",
            torch.zeros(3, 1),
            r"of sample 1 must have shape \[2, 1\], got \[3, 1\]. It is \[1, 1\] for a who",
        ),
        ("advantage", torch.zeros(1), r"of sample 1 must have shape \[2, 1\], got \[1\].*reward is \[\*batch, 1, 1\]"),
        ("advantage", torch.zeros(1, 1).long(), r"of sample 1 must have a floating point dtype, got torch.int64"),
        (REF, torch.zeros(2).long(), r"of sample 1 must have a floating point dtype, got torch.int64"),
    ],
)
def test_what_does_not_fit_the_tokens_is_named(key: Any, value: torch.Tensor, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(repr(key))} {told}"):
        read_all(changed(key, value))


def test_constant_log_probs() -> None:
    td = changed(LOG_PROBS, torch.zeros(2, requires_grad=True, dtype=torch.float64))
    told = r"^\('log_probs', 'full'\) requires grad, but the old policy is a constant: store it detached"
    with pytest.raises(ValueError, match=told):
        reader(td).constant_log_probs(LOG_PROBS, "the old policy")
    integers = lazy_stack([TensorDict({FULL: torch.zeros(2).long(), "x": torch.zeros(2).long()})])
    with pytest.raises(ValueError, match=r"^'x' must have a floating point dtype"):
        reader(integers).constant_log_probs("x", "the old policy")


VERSIONS = ("policy_versions", "full")
COUNTED = torch.tensor([[_, _, X, X], [_, _, _, X]])


def test_staleness_counts_updates_of_the_weights() -> None:
    td = changed(VERSIONS, torch.tensor([-1, 4], dtype=torch.int32))
    td[0][VERSIONS] = torch.tensor([-1, -1, 0, 3], dtype=torch.int32)
    staleness = reader(td).staleness(VERSIONS, "current_version", COUNTED)
    assert staleness.tolist() == [[0, 0, 4, 1], [0, 0, 0, 0]]
    assert staleness.dtype == torch.int64


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ([-1, 5], r"must be in 0..4 \('current_version'\) where a token counts, got \[.*5\]: -1 is for tokens that no"),
        ([-1, -1], r"must be in 0..4 .* got \[-1,"),
        ([0.0, 1.0], "must have an integer dtype, got torch.float32"),
    ],
)
def test_versions_that_make_no_sense_are_refused(versions: list[Any], told: str) -> None:
    td = changed(VERSIONS, torch.tensor(versions))
    td[0][VERSIONS] = torch.zeros(4).to(td[1][VERSIONS].dtype)
    with pytest.raises(ValueError, match=rf"^\('policy_versions', 'full'\) {told}"):
        reader(td).staleness(VERSIONS, "current_version", COUNTED)


def test_the_current_version_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"no 'trained': the version of the weights being trained.*torch.full"):
        reader().staleness(VERSIONS, "trained", COUNTED)


def test_tokens_that_are_no_integers_are_refused() -> None:
    td = ragged(samples([(2, 3)]))
    td[0]["tokens", "full"] = torch.tensor([1.0, 2.0, 3.0, 4.5, 5.0])
    with pytest.raises(ValueError, match=r"\('tokens', 'full'\) must have an integer dtype, got torch.float32"):
        TokenReader(td, ("tokens", "full"))
