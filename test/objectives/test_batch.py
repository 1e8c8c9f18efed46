"""Tensors come out aligned on the last token, the masks select what they say, and what does not fit is named."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from support.rollouts import PAD, dense, ragged, sample, samples
from torchrl_moe.objectives.batch import LossInputs, LossKeys, Masking, TokenReader

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


def test_ragged_samples_end_in_one_column_and_a_dense_batch_keeps_its_pads() -> None:
    tokens = [rollout[FULL].tolist() for rollout in ROLLOUTS]
    assert reader().tokens.tolist() == [tokens[0], [0, 0, *tokens[1]]]
    assert reader().lengths == [4, 2]
    values = reader().per_token(REF, "x", fill=-9.0)
    assert values[1].tolist() == [-9.0, -9.0, *ROLLOUTS[1][REF].tolist()]
    padded = reader(dense(ROLLOUTS, left=1, right=1))
    assert padded.tokens.tolist() == [[PAD, *tokens[0], PAD], [PAD, PAD, *tokens[1], PAD, PAD]]


@pytest.mark.parametrize(
    ("masking", "first", "second"),
    [("sft", [_, _, X, X], [_, _, _, X]), ("rlhf", [_, _, X, X], [_, _, _, X]), ("generic", [X] * 4, [_, _, X, X])],
)
def test_masks(masking: Masking, first: list[bool], second: list[bool]) -> None:
    assert mask(ragged(ROLLOUTS), masking) == [first, second]
    # prompts end in one column
    assert mask(dense(ROLLOUTS, left=1, right=1), masking) == [[_, *first, _], [_, *second[1:], _, _]]


def test_rlhf_sees_every_turn_and_sft_only_the_last() -> None:
    turns = torch.tensor([_, X, _, X])
    td = changed(ASSISTANT, turns, at=0)
    assert mask(td, "rlhf")[0] == turns.tolist()
    assert mask(td, "sft")[0] == [_, _, X, X]
    narrow, wide = dense(ROLLOUTS[1:], left=0, right=1)[0], dense(ROLLOUTS[:1], left=2, right=0)[0]
    assert mask(lazy_stack([narrow, wide]), "sft") == [[_, _, _, _, X, _], [_, _, _, _, X, X]]


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


@pytest.mark.parametrize("batch_size", [[], [0], [2, 1]])
def test_a_wrong_batch_size_is_refused(batch_size: list[int]) -> None:
    td = TensorDict({FULL: torch.zeros(*batch_size, 3).long()}, batch_size=batch_size)
    with pytest.raises(ValueError, match=rf"\[B\] with B >= 1, got {re.escape(str(batch_size))}: use td.reshape"):
        TokenReader(td, FULL)


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


def test_log_probs_are_constants_and_tokens_integers() -> None:
    td = changed(LOG_PROBS, torch.zeros(2, requires_grad=True, dtype=torch.float64))
    told = r"^\('log_probs', 'full'\) requires grad, but the old policy is a constant: store it detached"
    with pytest.raises(ValueError, match=told):
        reader(td).constant_log_probs(LOG_PROBS, "the old policy")
    integers = lazy_stack([TensorDict({FULL: torch.zeros(2).long(), "x": torch.zeros(2).long()})])
    with pytest.raises(ValueError, match=r"^'x' must have a floating point dtype"):
        reader(integers).constant_log_probs("x", "the old policy")
    with pytest.raises(ValueError, match=r"\('tokens', 'full'\) must have an integer dtype, got torch.float32"):
        reader(changed(FULL, torch.zeros(4), at=0))


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
    with pytest.raises(ValueError, match=r"no 'trained': the version of the weights being trained.*torch.full"):
        reader().staleness(VERSIONS, "trained", COUNTED)


# -- what is asked for is read, and nothing else -----------------------------------------------------------------------


PLAIN = LossInputs(
    masking="rlhf", reference=False, proximal=False, staleness=False, ref_side="left", ref_fill=float("nan")
)
EVERYTHING = replace(PLAIN, masking="sft", reference=True, proximal=True, staleness=True)
LONGER = samples([(2, 3), (1, 2)])


@pytest.mark.parametrize("wrong", [[0.0, -torch.inf, 0.0], [0.5, 1.0, 1.0], [-1, 0, 1], [1.0, torch.nan, 1.0]])
@pytest.mark.parametrize("key", [("masks", "all_assistant_mask"), ("masks", "all_attention_mask"), "mine"])
def test_a_mask_that_is_additive_or_of_weights_is_refused(key: Any, wrong: list[float]) -> None:
    td = ragged(LONGER)[1:]
    inputs = replace(PLAIN, masking="generic") if "all_attention_mask" in key else PLAIN
    user = key if key == "mine" else None
    td[0][key] = torch.tensor([0, 1, 1])
    assert inputs.read(td, LossKeys(), user).mask.sum() == 2
    td[0][key] = torch.tensor(wrong)
    with pytest.raises(ValueError, match=r"must be bool, or hold only 0 .* and 1 .*, got "):
        inputs.read(td, LossKeys(), user)


def test_what_has_a_gradient_or_no_token_dimension_is_refused() -> None:
    td = ragged(LONGER)
    td[1]["advantage"] = torch.ones(1, 1, requires_grad=True)
    with pytest.raises(ValueError, match="'advantage' of sample 1 requires grad, but an advantage is a constant"):
        PLAIN.read(td, LossKeys(), None)
    for key in (("next", "ref_log_probs", "full"), ("tokens", "full")):
        td = ragged(LONGER)
        td[0][key] = torch.tensor(1.0)
        with pytest.raises(ValueError, match="of sample 0 must be a tensor with a value per token, got tensor"):
            EVERYTHING.read(td, LossKeys(), None)
