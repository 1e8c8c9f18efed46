"""The steps from logits to topk, and from there to weights, are seen as they happen, and put into words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_moe.modules.replay.interception import ScoreTracer, describe_scoring

HIDDEN = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(8, generator=torch.Generator().manual_seed(2))


class Square(torch.autograd.Function):
    """Invisible to torch functions."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() ** 2)


def softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.linear(x, WEIGHT).softmax(-1)
    return scores, scores.topk(2).values


def normalised_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softmax(x @ WEIGHT.T, dim=-1, dtype=torch.float)
    weights, _ = torch.topk(scores, 2)
    weights /= weights.sum(-1, keepdim=True)
    return scores, weights


def biased(x: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(F.linear(x, WEIGHT))
    ranked = scores + BIAS
    weights = scores.gather(1, ranked.topk(2).indices.view(-1, 2))
    return ranked, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


def of_the_chosen(x: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, WEIGHT, BIAS)
    return logits, logits.topk(2).values.softmax(-1)


def scattered(x: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, WEIGHT)
    values, experts = logits.topk(2)
    return logits, torch.full_like(logits, float("-inf")).scatter_(1, experts, values).sigmoid()


def composed(x: Tensor) -> tuple[Tensor, Tensor]:
    ranked = F.softplus(torch.tanh(x @ WEIGHT.T)).sqrt()
    return ranked, ranked.topk(2).values * 2


def unseen(x: Tensor) -> tuple[Tensor, Tensor]:
    ranked = Square.apply(x @ WEIGHT.T)
    return ranked, ranked.topk(2).values


@pytest.mark.parametrize(
    ("router", "wanted"),
    [
        (softmax, "softmax"),
        (normalised_in_place, "softmax, normalised"),
        (biased, "sigmoid + bias, normalised"),
        (of_the_chosen, "logits, softmax of the chosen"),
        (scattered, "logits, sigmoid of the chosen"),
        (composed, "sqrt(softplus(tanh))"),
        (unseen, "own code"),
    ],
)
def test_what_a_router_does_is_put_into_words(router: Callable[[Tensor], tuple[Tensor, Tensor]], wanted: str) -> None:
    tracer = ScoreTracer({8}, ["layers.0.gate"])
    with tracer:
        ranked, weights = router(HIDDEN)
    plain_ranked, plain_weights = router(HIDDEN)
    assert torch.equal(ranked, plain_ranked)
    assert torch.equal(weights, plain_weights)
    assert describe_scoring(tracer.steps(ranked), tracer.weights.get("layers.0.gate", ())) == wanted


def test_weights_are_credited_to_the_module_that_made_them() -> None:
    running = ["gate"]
    tracer = ScoreTracer({8}, running)
    with tracer:
        _, weights = softmax(HIDDEN)
        running.append("experts")
        weights.softmax(-1)
    assert tracer.weights["gate"] == ("logits", "softmax", "chosen")
    assert tracer.weights["experts"] == ("logits", "softmax", "chosen", "softmax")


def test_a_matrix_product_begins_again() -> None:
    tracer = ScoreTracer({8}, [])
    with tracer:
        scores, _ = softmax(HIDDEN)
        again = scores @ WEIGHT
        plain = HIDDEN.softmax(-1)
    assert tracer.steps(again) == ("logits",)
    assert tracer.steps(plain) == ()


def test_tensors_are_not_kept_alive() -> None:
    tracer = ScoreTracer({8}, [])
    with tracer:
        made = softmax(HIDDEN)
    assert len(tracer._steps) == 2
    del made
    assert len(tracer._steps) == 0
