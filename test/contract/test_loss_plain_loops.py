"""Each loss has the numbers that its paper's equation gives by hand, and in plain loops, gradients included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support.naive import Answer, check_against, clip, fixed_length, prompt_mean, token_mean
from support.rollouts import BigramActor, GivenActor, by_hand, ragged, sample, total
from torchrl_moe.objectives import DAPO, CISPOLoss, DPPOLoss, GRPOLoss, GSPOLoss, SAPOLoss, Thresholds


def gate(ratio: float, tau: float) -> float:
    """SAPO's, of a ratio."""
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


ROOT = math.sqrt(1.5)
"""GSPO's ratio of the first answer; of the second it is 0.5."""
PAIR: dict[str, Any] = {"clip_epsilon": (0.2, 0.28)}


@pytest.mark.parametrize(
    ("loss", "arguments", "expected", "clipped"),
    [
        (DAPO, {}, (-2.56 - 2 + 0.8) / 3, 2 / 3),
        (CISPOLoss, PAIR, -(2.56 * math.log(0.6) + 2 * math.log(0.4) - 0.8 * math.log(0.2)) / 3, 2 / 3),
        (CISPOLoss, {}, -(3 * math.log(0.6) + 2 * math.log(0.4) - 0.5 * math.log(0.2)) / 3, 0),  # bounded above only
        (SAPOLoss, {}, (-2 * (gate(1.5, 1) + gate(1, 1)) / 2 + gate(0.5, 1.05)) / 2, 2 / 3),  # none of them is clipped
        (DPPOLoss, {}, -2 / 3, 2 / 3),  # 0.4 became 0.6 and 0.2, both by 0.2 > 0.15
        (DPPOLoss, {"clip_epsilon": (0.15, 0.25)}, (-3 - 2) / 3, 1 / 3),
        (DPPOLoss, {"clip_epsilon": (0.25, 0.15)}, (-2 + 0.5) / 3, 1 / 3),
        (DPPOLoss, {"clip_epsilon": 0.25, "max_ratio": 1.2}, (-2.4 - 2 + 0.5) / 3, 0),
        (DPPOLoss, {"divergence": "kl"}, -2 / 3, 2 / 3),  # 0.081 and 0.105 > 0.05
        *(
            (GSPOLoss, {"level": level, **arguments}, expected, clipped)
            for level in ("sequence", "token")
            for arguments, expected, clipped in (
                (PAIR, (-2 * ROOT + 0.8) / 2, 1 / 3),
                ({"clip_epsilon": 0.2}, (-2.4 + 0.8) / 2, 1),
                ({}, (-2 * 1.0004 + (1 - 3e-4)) / 2, 1),
            )
        ),
    ],
)
def test_golden_numbers(loss: type[GRPOLoss], arguments: dict[str, Any], expected: float, clipped: float) -> None:
    td, actor = by_hand()
    out = loss(actor, entropy_bonus=False, **arguments)(td)
    assert out.loss_objective.item() == pytest.approx(expected)
    assert out.clip_fraction.item() == pytest.approx(clipped)
    assert out.kl_approx.item() == pytest.approx(-(math.log(1.5) + math.log(0.5)) / 3)  # of tokens, in every loss


def ratios_of(answer: Answer) -> list[Tensor]:
    return [(pi - mu).exp() for pi, mu in zip(answer.pi, answer.mu, strict=True)]


def clipped(ratios: list[Tensor], advantages: list[float], low: float, high: float) -> list[Tensor]:
    return [-min(r * a, clip(r, low, high) * a) for r, a in zip(ratios, advantages, strict=True)]


def dapo(answer: Answer) -> list[Tensor]:
    return clipped(ratios_of(answer), answer.advantage, 0.8, 1.28)


def cispo(answer: Answer) -> list[Tensor]:
    weights = [min(max(ratio.item(), 0.7), 1.2) for ratio in ratios_of(answer)]
    return [-w * a * pi for w, a, pi in zip(weights, answer.advantage, answer.pi, strict=True)]


def sapo(answer: Answer) -> list[Tensor]:
    temperatures = [1.0 if a > 0 else 1.5 for a in answer.advantage]
    rows = zip(ratios_of(answer), answer.advantage, temperatures, strict=True)
    return [-a * 4 / tau / (1 + torch.exp(-tau * (r - 1))) for r, a, tau in rows]


def sequence_ratio(answer: Answer) -> Tensor:
    gaps = [pi - mu for pi, mu in zip(answer.pi, answer.mu, strict=True)]
    return torch.stack(gaps).mean().exp()


def gspo(answer: Answer) -> list[Tensor]:
    return clipped([sequence_ratio(answer)] * len(answer.pi), answer.advantage, 0.7, 1.5)


def gspo_token(answer: Answer) -> list[Tensor]:
    s = sequence_ratio(answer).detach()
    return clipped([s * pi.exp() / pi.exp().detach() for pi in answer.pi], answer.advantage, 0.7, 1.5)


def dppo(divergence: str) -> Any:
    def distance(p: Tensor, q: Tensor) -> Tensor:
        return (p - q).abs() if divergence == "tv" else q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()

    def loss(answer: Answer) -> list[Tensor]:
        out = []
        for pi, mu, a in zip(answer.pi, answer.mu, answer.advantage, strict=True):
            p, q = pi.detach().exp(), mu.exp()
            further_out = p > q if a > 0 else p < q
            out.append(-(pi - mu).exp() * a * (0.0 if further_out and distance(p, q) > 0.01 else 1.0))
        return out

    return loss


def k3(gap: Tensor) -> Tensor:
    return gap.exp() - 1 - gap


def grpo(answer: Answer) -> list[Tensor]:
    """With all of its terms."""
    terms = zip(
        clipped(ratios_of(answer), answer.advantage, 0.8, 1.28), answer.entropy, answer.ref, answer.mu, answer.pi,
        strict=True,
    )  # fmt: skip
    return [loss - 0.01 * spread + 0.3 * k3(ref - pi) + 0.2 * k3(mu - pi) for loss, spread, ref, mu, pi in terms]


def weighted_penalty(answer: Answer) -> list[Tensor]:
    """GRPO's objective, and ``r k3`` to the rollout policy."""
    objective = clipped(ratios_of(answer), answer.advantage, 0.8, 1.2)
    rows = zip(objective, ratios_of(answer), answer.mu, answer.pi, strict=True)
    return [loss + 0.5 * ratio * k3(mu - pi) for loss, ratio, mu, pi in rows]


def decoupled(answer: Answer) -> list[Tensor]:
    """With a truncated weight of sequences."""
    weight = min(math.exp(sum(prox - mu for prox, mu in zip(answer.prox, answer.mu, strict=True))), 1.5)
    ratios = [(pi - prox).exp() for pi, prox in zip(answer.pi, answer.prox, strict=True)]
    return [weight * loss for loss in clipped(ratios, answer.advantage, 0.8, 1.28)]


def interpolated(answer: Answer) -> list[Tensor]:
    out = []
    for pi, mu, age, a in zip(answer.pi, answer.mu, answer.age, answer.advantage, strict=True):
        prox = (mu / max(age, 1) + pi * (1 - 1 / max(age, 1))).detach()
        weight = min((prox - mu).exp().item(), 2.0)
        out += [weight * loss for loss in clipped([(pi - prox).exp()], [a], 0.8, 1.2)]
    return out


ALL_TERMS: dict[str, Any] = {"entropy_bonus": True, **PAIR, "kl_to_ref_coeff": 0.3, "kl_to_inference_coeff": 0.2}
DECOUPLED: dict[str, Any] = {"proximal_policy": "recomputed", "thresholds": Thresholds(seq_tis=1.5)}


@pytest.mark.parametrize(
    ("kind", "arguments", "loops", "mean"),
    [
        (GRPOLoss, ALL_TERMS, grpo, token_mean),
        (GRPOLoss, {**ALL_TERMS, "aggregation": "prompt_mean"}, grpo, prompt_mean),
        (GRPOLoss, {**ALL_TERMS, "aggregation": "sequence_mean"}, grpo, prompt_mean),
        (GRPOLoss, {**ALL_TERMS, "aggregation": "fixed_length", "fixed_length": 5}, grpo, fixed_length),
        (GRPOLoss, {"kl_to_inference_coeff": 0.5, "kl_off_policy": True}, weighted_penalty, token_mean),
        (GRPOLoss, {**PAIR, **DECOUPLED, "correction": "seq_tis"}, decoupled, token_mean),
        (GRPOLoss, {"proximal_policy": "interpolated", "correction": "tis"}, interpolated, token_mean),
        (DAPO, {}, dapo, token_mean),
        (CISPOLoss, {"clip_epsilon": (0.3, 0.2)}, cispo, token_mean),
        (SAPOLoss, {"temperatures": (1.0, 1.5)}, sapo, prompt_mean),
        (GSPOLoss, {"clip_epsilon": (0.3, 0.5)}, gspo, prompt_mean),
        (GSPOLoss, {"level": "token", "clip_epsilon": (0.3, 0.5)}, gspo_token, prompt_mean),
        (DPPOLoss, {"divergence": "tv", "clip_epsilon": 0.01}, dppo("tv"), token_mean),
        (DPPOLoss, {"divergence": "kl", "clip_epsilon": 0.01}, dppo("kl"), token_mean),
    ],
)
def test_values_and_gradients_of_plain_loops(kind: Any, arguments: dict[str, Any], loops: Any, mean: Any) -> None:
    shared = loops is gspo  # whose sequences have one advantage
    build = lambda actor: kind(actor, **{"entropy_bonus": False, **arguments})  # noqa: E731
    check_against(build, loops, mean, per_token_advantages=not shared)


@pytest.mark.parametrize("loss", [DPPOLoss, lambda actor, **given: GSPOLoss(actor, level="token", **given)])
def test_a_ratio_beyond_its_bound_keeps_its_gradient(loss: Any) -> None:
    """One token went from e^-22 to e^-1; DPPO counts it 20 times, GSPO's sequence has the ratio e^(20 / 3)."""
    td = ragged([sample(1, 3, advantage=torch.tensor([[-1.0]]))])
    td[0]["log_probs", "full"] = torch.tensor([math.nan, -22.0, -1.0, -1.0])
    actor = GivenActor(torch.tensor([[0.0, -1.0, -1.0, -1.0]]))
    loss(actor, entropy_bonus=False)(td).loss_objective.backward()
    weights = [20.0, 1.0, 1.0] if loss is DPPOLoss else [math.exp(20 / 3)] * 3
    torch.testing.assert_close(actor.log_probs.grad, torch.tensor([[0.0, *weights]]) / 3)


def test_a_token_left_out_has_no_gradient() -> None:
    """The first one, of ratio 1.5."""
    td, actor = by_hand()
    loss = GSPOLoss(
        actor, level="token", clip_epsilon=0.9, correction="icepop", thresholds=Thresholds(icepop=(0.6, 1.4))
    )
    total(loss(td)).backward()
    assert actor.log_probs.grad[0].tolist()[:2] == [0, 0]
    assert actor.log_probs.grad[0, 2] != 0


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
    with pytest.raises(ValueError, match=rf"takes no mask of tokens, got {told}: .* would keep its gradient"):
        GSPOLoss(BigramActor(), **arguments)
    GSPOLoss(BigramActor(), level="token", **arguments)
