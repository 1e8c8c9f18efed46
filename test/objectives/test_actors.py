"""An actor is asked once, for what is needed, and what it answers is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor

from objectives.rollouts import VOCABULARY, BigramActor, GivenActor, ragged, samples
from torchrl_moe.objectives.actors import score_tokens

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
    assert entropy is not None
    torch.testing.assert_close(scores.log_probs, log_probs)
    torch.testing.assert_close(scores.entropy, entropy)


def test_entropies_that_nobody_wants_are_not_computed() -> None:
    actor = BigramActor()
    assert score_tokens(actor, TD, TOKENS, ATTENTION, entropy=False).entropy is None
    assert actor.calls == [{"router_logits": False, "entropy": False}]


def test_an_actor_with_distributions() -> None:
    actor = DistActor()
    scores = score_tokens(actor, TD, TOKENS, ATTENTION, entropy=True)
    torch.testing.assert_close(scores.log_probs, Distribution(actor.logits).log_prob(TOKENS))
    torch.testing.assert_close(scores.entropy, Distribution(actor.logits).entropy())
    assert actor.asked == {"mask_key": ATTENTION, "padding_side": "left"}
    assert "scribble" not in TD.keys()  # noqa: SIM118  a TensorDict iterates over its batch
    assert score_tokens(actor, TD, TOKENS, ATTENTION, entropy=False).entropy is None


def test_wrong_shapes_are_refused() -> None:
    aligned = "An actor scores each token of the input, padded on the left"
    with pytest.raises(ValueError, match=rf"log-probs of the actor \[2, 4\], tokens \[2, 5\]. {aligned}"):
        score_tokens(GivenActor(torch.zeros(2, 4)), TD, TOKENS, ATTENTION, entropy=False)
    with pytest.raises(ValueError, match=rf"entropies of the actor \[2, 4\], tokens \[2, 5\]. {aligned}"):
        score_tokens(GivenActor(torch.zeros(2, 5), torch.zeros(2, 4)), TD, TOKENS, ATTENTION, entropy=True)
    with pytest.raises(
        ValueError, match=rf"logits of the actor must have shape \[2, 5, V\], got \[2, 4, 11\]. {aligned}"
    ):
        score_tokens(DistActor(width=4), TD, TOKENS, ATTENTION, entropy=False)


def test_missing_entropies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"entropy_bonus=True needs entropies, .* pass entropy_bonus=False"):
        score_tokens(GivenActor(torch.zeros(2, 5)), TD, TOKENS, ATTENTION, entropy=True)
