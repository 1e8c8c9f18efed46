"""What is asked for is read, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.rollouts import dense, ragged, samples
from torchrl_moe.objectives.batch import LossInputs, LossKeys

PLAIN = LossInputs(
    masking="rlhf", reference=False, proximal=False, staleness=False, ref_side="left", ref_fill=float("nan")
)
EVERYTHING = replace(PLAIN, masking="sft", reference=True, proximal=True, staleness=True)
ROLLOUTS = samples([(2, 3), (1, 2)])


def test_keys() -> None:
    names = LossKeys()
    assert PLAIN.keys(names) == [names.action, names.sample_log_prob, names.advantage, names.assistant_mask]
    assert set(EVERYTHING.keys(names)) == {
        names.action,
        names.sample_log_prob,
        names.advantage,
        names.attention_mask,
        names.prompt,
        names.ref_log_probs,
        names.prox_log_prob,
        names.policy_versions,
        names.current_version,
    }
    renamed = LossKeys(prox_log_prob=("log_probs", "old"))
    assert ("log_probs", "old") in EVERYTHING.keys(renamed)


def test_only_what_is_asked_for_is_read() -> None:
    td = ragged(ROLLOUTS).exclude("prox_log_prob", "policy_versions", "current_version", ("next", "ref_log_probs"))
    batch = PLAIN.read(td, LossKeys(), None)
    optional = (batch.ref_log_probs, batch.prox_log_probs, batch.staleness, batch.num_valid_tokens, batch.sum_weights)
    assert optional == (None,) * 5
    for inputs, key in (
        (replace(PLAIN, proximal=True), "prox_log_prob"),
        (replace(PLAIN, staleness=True), "policy_versions"),
        (replace(PLAIN, reference=True), "ref_log_probs"),
    ):
        with pytest.raises(ValueError, match=f"the tensordict has no .*{key}"):
            inputs.read(td, LossKeys(), None)


def test_both_layouts_give_the_same_tokens() -> None:
    one, other = (EVERYTHING.read(td, LossKeys(), None) for td in (ragged(ROLLOUTS), dense(ROLLOUTS, 1, 2)))
    for name in ("tokens", "sample_log_probs", "ref_log_probs", "prox_log_probs", "staleness", "advantage"):
        values, others = getattr(one, name)[one.mask], getattr(other, name)[other.mask]
        torch.testing.assert_close(values, others, rtol=0, atol=0)
    assert one.mask.sum() == 5


def test_a_mask_of_the_user() -> None:
    td = ragged(ROLLOUTS)
    for i, keep in enumerate(([False, False, True, False, True], [False, True, False])):
        td[i]["mine"] = torch.tensor(keep)
    mask = PLAIN.read(td, LossKeys(), "mine").mask
    assert mask.tolist() == [[False, False, True, False, True], [False, False, False, True, False]]


@pytest.mark.parametrize("wrong", [[0.0, -torch.inf, 0.0], [0.5, 1.0, 1.0], [-1, 0, 1], [1.0, torch.nan, 1.0]])
@pytest.mark.parametrize("key", [("masks", "all_assistant_mask"), ("masks", "all_attention_mask"), "mine"])
def test_a_mask_that_is_additive_or_of_weights_is_refused(key: Any, wrong: list[float]) -> None:
    td = ragged(ROLLOUTS)[1:]
    inputs = replace(PLAIN, masking="generic") if "all_attention_mask" in key else PLAIN
    user = key if key == "mine" else None
    td[0][key] = torch.tensor([0, 1, 1])
    assert inputs.read(td, LossKeys(), user).mask.sum() == 2
    td[0][key] = torch.tensor(wrong)
    with pytest.raises(ValueError, match=r"must be bool, or hold only 0 .* and 1 .*, got "):
        inputs.read(td, LossKeys(), user)


def test_what_has_a_gradient_or_no_token_dimension_is_refused() -> None:
    td = ragged(ROLLOUTS)
    td[1]["advantage"] = torch.ones(1, 1, requires_grad=True)
    with pytest.raises(ValueError, match="'advantage' of sample 1 requires grad, but an advantage is a constant"):
        PLAIN.read(td, LossKeys(), None)
    for key in (("next", "ref_log_probs", "full"), ("tokens", "full")):
        td = ragged(ROLLOUTS)
        td[0][key] = torch.tensor(1.0)
        with pytest.raises(ValueError, match="of sample 0 must be a tensor with a value per token, got tensor"):
            EVERYTHING.read(td, LossKeys(), None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"masking": "all"}, r"masking_strategy must be one of \['sft', 'rlhf', 'generic'\], got 'all'"),
        ({"ref_side": "both"}, r"ref_log_prob_padding_side must be one of \['left', 'right'\], got 'both'"),
    ],
)
def test_wrong_choices_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(PLAIN, **change)
