"""An actor is asked once, for what is needed, and what it answers is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor

from support.rollouts import VOCABULARY, BigramActor, GivenActor, ragged, samples
from torchrl_moe.objectives.batch import score_reference, score_tokens

ATTENTION = ("masks", "all_attention_mask")
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


def test_a_scoring_actor() -> None:
    actor = BigramActor()
    scores = score_tokens(actor, TD, TOKENS, ATTENTION, entropy=True)
    log_probs, entropy, _ = actor.score(TD)
    torch.testing.assert_close(scores[:2], (log_probs, entropy))
    assert score_tokens(actor, TD, TOKENS, ATTENTION, entropy=False).entropy is None
    assert actor.calls[-1] == {"router_logits": False, "entropy": False}  # nobody wants them


class MaskedActor(BigramActor):
    """Computes what is read, and leaves the rest 0."""

    mask: Tensor | None = None

    def score(self, td: TensorDictBase, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> Any:
        self.mask = mask
        log_probs, entropy, _ = super().score(td, **kwargs)
        return log_probs * mask, entropy, None


def test_the_tokens_that_are_read_are_told_to_an_actor_that_asks() -> None:
    mask = torch.tensor([[False, False, True, True, True], [False, False, False, False, True]])
    whole = score_tokens(BigramActor(), TD, TOKENS, ATTENTION, entropy=True, mask=mask)
    actor = MaskedActor()
    part = score_tokens(actor, TD, TOKENS, ATTENTION, entropy=True, mask=mask)
    assert actor.mask is mask
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


ALIGNED = "An actor scores each token of the input, padded on the left"


@pytest.mark.parametrize(
    ("actor", "told"),
    [
        (GivenActor(torch.zeros(2, 4)), rf"log-probs of the actor \[2, 4\], tokens \[2, 5\]. {ALIGNED}"),
        (GivenActor(torch.zeros(2, 5)), "entropy_bonus=True needs entropies, .* pass entropy_bonus=False"),
        (
            GivenActor(torch.zeros(2, 5), torch.zeros(2, 4)),
            rf"entropies of the actor \[2, 4\], tokens \[2, 5\]. {ALIGNED}",
        ),
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
