"""Tensors come out aligned on the last token, masks select what they say, actors are asked for what is needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor

from support.rollouts import VOCABULARY, BigramActor, GivenActor, dense, ragged, sample, samples
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.objectives.batch import LossInputs, LossKeys, Masking, TokenReader, score_reference, score_tokens
from torchrl_moe.testing import make_tiny_moe

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


def read_all(td: TensorDictBase) -> None:
    every = TokenReader(td, FULL)
    for one in get_args(Masking):
        every.mask(one, PROMPT, ATTENTION, ASSISTANT)
    every.constant_log_probs(LOG_PROBS, "the policy that generated the tokens")
    every.ref_log_probs(REF, "left", 0.0)
    every.advantage("advantage")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (LOG_PROBS, torch.zeros(3), r"must have shape \[2\], got \[3\]. It has a value for each token"),
        (ATTENTION, torch.ones(1).bool(), r"must have shape \[2\], got \[1\]"),
        (ASSISTANT, torch.ones(1).bool(), r"must have shape \[2\], got \[1\]"),
        (REF, torch.zeros(2, 2), r"must have shape \[2\], got \[2, 2\]"),
        (REF, torch.zeros(2).long(), "must have a floating point dtype, got torch.int64"),
        (PROMPT, torch.zeros(3).long(), "has 3 tokens, got only 2 in all"),
        ("advantage", torch.zeros(3, 1), r"must have shape \[2, 1\], got \[3, 1\]. It is \[1, 1\] for a who"),
        ("advantage", torch.zeros(1), r"must have shape \[2, 1\], got \[1\].*reward is \[\*batch, 1, 1\]"),
        ("advantage", torch.zeros(1, 1).long(), "must have a floating point dtype, got torch.int64"),
    ],
)
def test_what_does_not_fit_the_tokens_is_named(key: Any, value: torch.Tensor, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(repr(key))} of sample 1 {told}"):
        read_all(changed(key, value))


def test_what_has_no_samples_a_gradient_or_another_dtype_is_refused() -> None:
    for size in ([], [0], [2, 1]):
        with pytest.raises(ValueError, match=rf"\[B\] with B >= 1, got {re.escape(str(size))}: use td.reshape"):
            TokenReader(TensorDict({FULL: torch.zeros(*size, 3).long()}, batch_size=size), FULL)
    td = changed(LOG_PROBS, torch.zeros(2, requires_grad=True, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^\('log_probs', 'full'\) requires grad, but the old policy is a constant"):
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


# -- an actor is asked once, for what is needed, and what it answers is checked ----------------------------------------


TD = ragged(samples([(2, 3), (1, 1)]))
TOKENS = TD.get(("tokens", "full"), as_padded_tensor=True, padding_side="left")


class Distribution:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def log_prob(self, tokens: Tensor) -> Tensor:
        return self.logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    def entropy(self) -> Tensor:
        return torch.distributions.Categorical(logits=self.logits).entropy()


class DistActor:
    """Answers as TorchRL's wrappers do: with a distribution."""

    def __init__(self, width: int = 5) -> None:
        self.logits = torch.randn(2, width, VOCABULARY)
        self.asked: dict[str, Any] = {}

    def get_dist(self, td: TensorDictBase, **kwargs: Any) -> Distribution:
        self.asked = kwargs
        td["scribble"] = torch.zeros(len(td))
        return Distribution(self.logits)


class MaskedActor(BigramActor):
    """Computes what is read, and leaves the rest 0."""

    def score(self, td: TensorDictBase, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> Any:
        log_probs, entropy, _ = super().score(td, **kwargs)
        return log_probs * mask, entropy, None


def test_the_tokens_that_are_read_are_told_to_an_actor_that_asks() -> None:
    mask = torch.tensor([[False, False, True, True, True], [False, False, False, False, True]])
    whole, part = (score_tokens(kind(), TD, TOKENS, ATTENTION, True, mask=mask) for kind in (BigramActor, MaskedActor))
    torch.testing.assert_close(part.log_probs, whole.log_probs * mask)
    assert whole.log_probs[~mask].any()  # that actor does not know the argument


class PlainActor(DistActor):
    def get_dist(self, td: TensorDictBase) -> Distribution:  # type: ignore[override]
        return Distribution(self.logits)


@pytest.mark.parametrize("actor", [DistActor(), PlainActor()])
def test_an_actor_with_distributions(actor: DistActor) -> None:
    scores = score_tokens(actor, TD, TOKENS, ATTENTION, entropy=True)
    torch.testing.assert_close(scores.log_probs, Distribution(actor.logits).log_prob(TOKENS))
    torch.testing.assert_close(scores.entropy, Distribution(actor.logits).entropy())
    assert actor.asked == ({} if type(actor) is PlainActor else {"mask_key": ATTENTION, "padding_side": "left"})
    assert "scribble" not in TD.keys()  # noqa: SIM118  a TensorDict iterates over its batch
    assert score_tokens(actor, TD, TOKENS, ATTENTION, entropy=False).entropy is None


def test_a_probabilistic_module_of_tensordict() -> None:
    """It hands keywords that it does not know to its modules, which take none."""
    logits = torch.randn(VOCABULARY, VOCABULARY)
    tokens = ("tokens", "padded")
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(lambda ids: logits[ids.roll(1, -1)], in_keys=[tokens], out_keys=["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical),
    )
    td = TensorDict({tokens: TOKENS}, batch_size=[2])
    scores = score_tokens(actor, td, TOKENS, ATTENTION, entropy=True)
    expected = torch.distributions.Categorical(logits=logits[TOKENS.roll(1, -1)])
    torch.testing.assert_close(scores.log_probs, expected.log_prob(TOKENS))
    torch.testing.assert_close(scores.entropy, expected.entropy())


ZEROS = torch.zeros(2, 5)
ALIGNED = "An actor scores each token of the input, padded on the left"


@pytest.mark.parametrize(
    ("actor", "told"),
    [
        (GivenActor(ZEROS[:, 1:]), rf"log-probs of the actor \[2, 4\], tokens \[2, 5\]. {ALIGNED}"),
        (GivenActor(ZEROS), "entropy_bonus=True needs entropies, .* pass entropy_bonus=False"),
        (GivenActor(ZEROS, ZEROS[:, 1:]), rf"entropies of the actor \[2, 4\], tokens \[2, 5\]. {ALIGNED}"),
        (DistActor(width=4), rf"logits of the actor must have shape \[2, 5, V\], got \[2, 4, 11\]. {ALIGNED}"),
    ],
)
def test_wrong_answers_are_refused(actor: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        score_tokens(actor, TD, TOKENS, ATTENTION, entropy=True)


class AdaptedActor(torch.nn.Module):
    """Of a peft model; it writes into what it is given."""

    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        net = torch.nn.Sequential(torch.nn.Linear(3, 2))
        self.model: Any = get_peft_model(net, LoraConfig(target_modules=["0"], init_lora_weights=False))
        self.asked: list[bool] = []

    def score(self, td: TensorDictBase, entropy: bool = True) -> tuple[Tensor, None, None]:
        self.asked.append(entropy)
        td["scribble"] = torch.zeros(len(td))
        return self.model(torch.ones(*TOKENS.shape, 3))[..., 0], None, None


def test_the_reference_follows_the_experts_that_the_actor_recorded() -> None:
    """Also where the actor records again in each pass without gradients."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    actor = TransformersWrapper(get_peft_model(make_tiny_moe(), lora), replay="R2")
    ids = torch.arange(3, 23).reshape(2, 10)
    td = TensorDict({"tokens": {"full": ids}, "masks": {"all_attention_mask": torch.ones_like(ids).bool()}}, [2])
    with torch.no_grad():
        actor.score(td)
    again = actor.get_new_version(rerecord=True)
    wanted, live = (score_reference(one, td, ids, ATTENTION) for one in (actor, actor.get_new_version(replay="none")))
    assert not torch.equal(wanted, live)
    assert torch.equal(score_reference(again, td, ids, ATTENTION), wanted)


def test_the_reference_is_the_model_without_its_adapter() -> None:
    actor, td = AdaptedActor(), TD.copy()
    base = actor.model.base_model.model[0].base_layer(torch.ones(3))[0]
    reference = score_reference(actor, td, TOKENS, ATTENTION)
    torch.testing.assert_close(reference, base.detach().expand(TOKENS.shape))
    assert not reference.requires_grad
    assert actor.asked == [False]
    assert "scribble" not in td.keys()  # noqa: SIM118  a TensorDict iterates over its batch
    assert (actor.score(td)[0] - base).abs().min() > 1e-3  # the adapter is on again
    told = r"reference='adapter' needs a model with an adapter .* got BigramActor of NoneType: use reference='key'"
    with pytest.raises(ValueError, match=told):
        score_reference(BigramActor(), TD, TOKENS, ATTENTION)
