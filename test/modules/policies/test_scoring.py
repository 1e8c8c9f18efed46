"""The tensors of a scoring pass, by hand: layouts, masks, and what a row of logits says about which token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_moe.modules.policies.scoring import ScoringBatch, read_batch
from torchrl_moe.modules.policies.scoring_wrapper import ScoringWrapper
from torchrl_moe.objectives.batch import TokenReader

FULL, ATTENTION, ASSISTANT = ("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")


def one(ids: list[int], mask: list[int] | None = None) -> TensorDict:
    td = TensorDict({"tokens": {"full": torch.tensor(ids)}})
    if mask is not None:
        td["masks"] = {"all_attention_mask": torch.tensor(mask).bool()}
    return td


def ragged() -> TensorDictBase:
    return lazy_stack([one([5, 6], [1, 1]), one([7, 8, 9, 10], [1, 1, 1, 1])])


def test_what_is_missing_of_another_length_or_no_integer_is_named() -> None:
    with pytest.raises(KeyError, match=r"in every sample; the first one has .*full") as error:
        read_batch(ragged(), ("tokens", "ids"), ATTENTION)
    assert error.value.args[0].startswith("no ('tokens', 'ids') in every sample")
    with pytest.raises(KeyError, match=r"in every sample; the first one has .*all_attention_mask"):
        read_batch(lazy_stack([one([5], [1]), one([5])]), ATTENTION, FULL)
    td = lazy_stack([one([5, 6, 7], [1, 1]), one([7, 8, 9, 10], [1, 1, 1, 1])])
    with pytest.raises(ValueError, match=r"'all_attention_mask'\) of sample 0 has 2 rows, its tokens are 3"):
        read_batch(td, FULL, ATTENTION)
    td = lazy_stack([one([5, 6])])
    td[FULL] = td[FULL].float()
    with pytest.raises(ValueError, match=r"\('tokens', 'full'\) of sample 0"):
        read_batch(td, FULL, ATTENTION)


# -- dense distributions, of a wrapper without a model: which tokens they are of --------------------------------------

WORDS = 5


class Wrapper(ScoringWrapper):
    """Its logits are ever the same."""

    tokens_key, masks_key = "tokens", "masks"

    def _batch(self, td: TensorDictBase) -> ScoringBatch:
        return read_batch(td, FULL, ATTENTION)

    def _token_logits(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor:
        return torch.randn(*batch.ids.shape, WORDS, generator=torch.Generator().manual_seed(0))


def sample(prompt: int, response: int) -> TensorDict:
    """The second token of a prompt is an earlier turn of the assistant."""
    ids = torch.arange(prompt + response) % WORDS
    assistant = torch.arange(len(ids)) >= prompt
    assistant[1] = True
    masks = {"all_attention_mask": torch.ones(len(ids), dtype=torch.bool), "all_assistant_mask": assistant}
    return TensorDict({"tokens": {"full": ids, "prompt": ids[:prompt]}, "masks": masks})


@pytest.fixture
def td() -> TensorDictBase:
    return lazy_stack([sample(3, 2), sample(2, 1), sample(4, 4)])


def test_the_prompt_mask_is_that_of_our_loss(td: TensorDictBase) -> None:
    actor, reader = Wrapper(), TokenReader(td, FULL)
    scored, counts = actor._batch(td).scored, {"sft": 7, "rlhf": 7 + 3, "generic": 13}
    for strategy, count in counts.items():
        mask = getattr(actor, f"_get_{strategy}_dist")(td).mask
        assert torch.equal(mask, reader.mask(strategy, ("tokens", "prompt"), ATTENTION, ASSISTANT) & scored)
        assert mask.sum() == count
    rlhf = actor._get_rlhf_dist(td).mask
    del td["tokens", "prompt"]
    assert torch.equal(actor._get_dist_with_prompt_mask(td).mask, rlhf)


def test_masks_may_have_other_keys(td: TensorDictBase) -> None:
    actor = Wrapper()
    for one in td.unbind(0):
        one["mine"] = torch.arange(len(one[FULL])) >= len(one[FULL]) - 2
    dist = actor.get_dist(td, mask_key="mine")
    assert dist.mask.sum() == 6
    for other in (
        actor._get_dist_with_assistant_mask(td, "mine"),
        actor._get_dist_with_attention_mask(td, "mine"),
        actor._get_dist_with_custom_mask(td, dist.mask),
        actor._get_dist_with_prompt_mask(td.exclude(("tokens", "prompt")), assistant_mask_key="mine"),
    ):
        assert torch.equal(other.mask, dist.mask)
    both = actor._get_dist_with_prompt_mask(td, attention_mask_key="mine").mask
    assert torch.equal(both, dist.mask & actor._get_sft_dist(td).mask)
    with pytest.raises(KeyError, match=r"yours.* in every sample"):
        actor.get_dist(td, mask_key="yours")
    with pytest.raises(ValueError, match=r"mask has shape \[2, 3\], the padded tokens have"):
        actor._get_dist_with_custom_mask(td, torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padding_side": "right"}, "padded on the left .* got padding_side='right'"),
        ({"logits_key": "scores"}, "logits_key='scores'"),
        ({"tensordict_out": TensorDict()}, "writes nothing: leave tensordict_out"),
        ({"as_nested_tensor": True}, "returns dense distributions"),
        ({"as_padded_tensor": False}, "returns dense distributions"),
        ({"padding_value": -1.0}, "got padding_value=-1.0"),
        ({"layout": torch.jagged}, "layout=torch.jagged"),
    ],
)
def test_what_a_distribution_cannot_be_is_refused(td: TensorDictBase, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wrapper().get_dist(td, **arguments)
