"""One ratio for a sequence, and its token variant."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support.naive import Answer, check_against, clip, prompt_mean
from support.rollouts import BigramActor, by_hand, ragged, samples, total
from torchrl_moe.objectives import GSPOLoss, Thresholds


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize(
    ("epsilon", "first", "clipped"),
    [((0.2, 0.28), -2 * math.sqrt(1.5), 1 / 3), ((0.2, 0.2), -2.4, 1.0)],
)
def test_golden_numbers(level: Any, epsilon: Any, first: float, clipped: float) -> None:
    """Of the first answer s is √1.5 = 1.225, of the second it is 0.5."""
    td, actor = by_hand()
    out = GSPOLoss(actor, level=level, clip_epsilon=epsilon, entropy_bonus=False)(td)
    assert out.loss_objective.item() == pytest.approx((first + 0.8) / 2)
    assert out.clip_fraction.item() == pytest.approx(clipped)
    assert out.kl_approx.item() == pytest.approx(-(math.log(1.5) + math.log(0.5)) / 3)  # of tokens, as in every loss


def test_the_default_range_is_the_paper_s() -> None:
    td, actor = by_hand()
    assert GSPOLoss(actor)(td).loss_objective.item() == pytest.approx((-2 * 1.0004 + 1 * (1 - 3e-4)) / 2)


def test_values_and_gradients_of_plain_loops() -> None:
    def loss(answer: Answer) -> list[Tensor]:
        n = len(answer.pi)
        s = (sum(pi - mu for pi, mu in zip(answer.pi, answer.mu, strict=True)) / n).exp()  # type: ignore[union-attr]
        return [-min(s * a, clip(s, 0.7, 1.5) * a) for a in answer.advantage]

    check_against(lambda actor: GSPOLoss(actor, clip_epsilon=(0.3, 0.5), entropy_bonus=False), loss, prompt_mean)


def test_the_token_variant_lets_advantages_differ() -> None:
    def loss(answer: Answer) -> list[Tensor]:
        n = len(answer.pi)
        s = (sum(pi - mu for pi, mu in zip(answer.pi, answer.mu, strict=True)) / n).exp().detach()  # type: ignore[union-attr]
        ratios = [s * pi.exp() / pi.exp().detach() for pi in answer.pi]
        return [-min(r * a, clip(r, 0.7, 1.5) * a) for r, a in zip(ratios, answer.advantage, strict=True)]

    check_against(
        lambda actor: GSPOLoss(actor, level="token", clip_epsilon=(0.3, 0.5), entropy_bonus=False),
        loss,
        prompt_mean,
        per_token_advantages=True,
    )


def test_both_levels_agree_where_a_sequence_shares_its_advantage() -> None:
    td, actor = ragged(samples([(2, 3), (1, 4)])), BigramActor()
    losses = [total(GSPOLoss(actor, level=level, clip_epsilon=0.9)(td)) for level in ("sequence", "token")]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, actor.logits)[0] for loss in losses))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"correction": "mis"}, "mis"),
        ({"correction": ["icepop", "geo"]}, "icepop"),
        ({"correction": "staleness_mask"}, "staleness_mask"),
        ({"kl_mask_threshold": 0.5}, "kl_mask_threshold"),
    ],
)
def test_masks_of_tokens_are_for_the_token_level(arguments: dict[str, Any], told: str) -> None:
    actor = BigramActor()
    with pytest.raises(ValueError, match=rf"takes no mask of tokens, got {told}: .* would keep its gradient"):
        GSPOLoss(actor, **arguments)
    GSPOLoss(actor, level="token", **arguments)


def test_a_token_left_out_has_no_gradient() -> None:
    """The first one, of ratio 1.5."""
    td, actor = by_hand()
    cuts = Thresholds(icepop=(0.6, 1.4))
    arguments: dict[str, Any] = {"clip_epsilon": 0.9, "entropy_bonus": False, "thresholds": cuts}
    total(GSPOLoss(actor, level="token", correction="icepop", **arguments)(td)).backward()
    assert actor.log_probs.grad is not None
    assert actor.log_probs.grad[0].tolist()[:2] == [0, 0]
    assert actor.log_probs.grad[0, 2] != 0


def test_weights_need_a_proximal_policy() -> None:
    with pytest.raises(
        ValueError, match=r"correction='seq_tis' is an importance weight.* mean over a sequence in GSPO"
    ):
        GSPOLoss(BigramActor(), correction="seq_tis")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"level must be one of \['sequence', 'token'\], got 'word'"):
        GSPOLoss(by_hand()[1], level="word")  # type: ignore[arg-type]
