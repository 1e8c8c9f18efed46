"""A router's ``topk`` is answered; what it does with the answer is its own; in models: ``test_family_replay.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_moe.modules.replay.interception import (
    OwnChoice,
    ScoreTracer,
    TopKInterception,
    TopKObserver,
    describe_scoring,
)

SCORES = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.0, 0.1, 0.2]])
GIVEN = torch.tensor([[2, 0], [3, 1]])


def given(*_: object) -> Tensor:
    return GIVEN


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.topk(x, 2),
        lambda x: torch.topk(x, 2, dim=-1),
        lambda x: torch.topk(input=x, k=2, dim=1, sorted=False),
        lambda x: x.topk(2),
        lambda x: x.topk(k=2, dim=-1),
    ],
)
def test_topk_answers_with_the_given_experts_and_their_live_scores(call: Callable[[Tensor], object]) -> None:
    scores = SCORES.clone().requires_grad_()
    with TopKInterception(4, 2, 2, given):
        values, experts = call(scores)
    assert experts.tolist() == GIVEN.tolist()
    torch.testing.assert_close(values, torch.tensor([[0.2, 0.1], [0.2, 0.0]]))
    values.sum().backward()
    assert scores.grad.tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.topk(3),
        lambda x: x[:, :3].topk(2),
        lambda x: x.T.topk(2, dim=0),
        lambda x: x[:, None].topk(2),
        lambda x: x.sort(-1),
        lambda x: x.max(-1),
    ],
)
def test_any_other_call_is_left_alone(call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    with TopKInterception(4, 2, 2, given, given):
        got = call(SCORES)
    for one, other in zip(got, call(SCORES), strict=True):
        assert torch.equal(one, other)


def test_the_routers_own_choice_comes_without_a_graph() -> None:
    own_choices = []

    def choose(scores: Tensor, own: OwnChoice) -> Tensor:
        assert torch.equal(scores, SCORES)
        own_choices.append(own(None))
        return own_choices[-1].indices

    with TopKInterception(4, 2, 2, choose):
        values, experts = SCORES.clone().requires_grad_().topk(2)
    assert torch.equal(experts, SCORES.topk(2).indices)
    assert torch.equal(values, SCORES.topk(2).values)
    assert not own_choices[0].values.requires_grad
    assert values.requires_grad


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda x: x.topk(1), [0]),
        (lambda x: x.topk(1, -1, False), [1]),
        (lambda x: torch.topk(x, 1, -1, largest=False, sorted=False), [1]),
        (lambda x: x.topk(1, dim=-1, largest=True), [0]),
    ],
)
def test_the_routers_own_choice_of_some_rows_is_that_of_its_call(call: Callable[[Tensor], Any], wanted: Any) -> None:
    own_choices = []

    def choose(_: Tensor, own: OwnChoice) -> Tensor:
        own_choices.append(own(torch.tensor([1])).indices)
        return GIVEN[:, :1]

    for shape in ((2, 4), (1, 2, 4)):
        with TopKInterception(4, 1, len(shape), choose):
            call(SCORES.view(shape))
        assert own_choices.pop().tolist() == [wanted]


@pytest.mark.parametrize("call", [lambda x: x.topk(8, sorted=False), lambda x: torch.topk(x, 8, -1, True, False)])
def test_its_order_is_kept_too(call: Callable[[Tensor], torch.return_types.topk]) -> None:
    """In which experts are added up: with another one a live row's output is not the model's, by rounding."""
    scores = torch.rand(64, 16, generator=torch.Generator().manual_seed(0))
    own_choices = []

    def choose(x: Tensor, own: OwnChoice) -> Tensor:
        own_choices.append(own(torch.arange(32)).indices)
        return x.argsort(-1)[:, :8]

    with TopKInterception(16, 8, 2, choose):
        call(scores)
    assert torch.equal(own_choices[0], call(scores).indices[:32])
    assert not torch.equal(own_choices[0], scores.topk(8).indices[:32])


def test_groups_are_opened_before_the_experts_are_chosen_and_not_after() -> None:
    seen = []

    def groups(scores: Tensor, _: object, top_k: int) -> Tensor:
        assert top_k == 1
        seen.append(scores)
        return GIVEN // 2

    with TopKInterception(4, 2, 2, given, groups):
        opened = SCORES[:, :2].topk(1).indices
        SCORES.topk(2)
        after = SCORES[:, :2].topk(1).indices
    assert opened.tolist() == [[1, 0], [1, 0]]
    assert len(seen) == 1
    assert after.tolist() == [[1], [0]]


def test_an_observer_tells_of_each_topk_and_changes_nothing() -> None:
    told: list[tuple[Tensor, Tensor]] = []
    with TopKObserver(lambda x, chosen: told.append((x, chosen))):
        got = SCORES.topk(2)
        SCORES.topk(1, dim=0)
        SCORES.sort(-1)
    assert torch.equal(got.values, SCORES.topk(2).values)
    assert len(told) == 1
    assert torch.equal(told[0][0], SCORES)
    assert torch.equal(told[0][1], got.indices)


# -- the steps from logits to topk, and from there to weights, are seen as they happen, and put into words


HIDDEN = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


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
        (normalised_in_place, "softmax, normalised"),
        (scattered, "logits, sigmoid of the chosen"),
        (composed, "sqrt(softplus(tanh))"),
        (unseen, "own code"),
    ],
)
def test_what_a_router_does_is_put_into_words(router: Callable[[Tensor], tuple[Tensor, Tensor]], wanted: str) -> None:
    """What no family does; ``test_family_replay.py`` compares a table of those with what is found."""
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


def test_a_matrix_product_begins_again_and_tensors_are_not_kept_alive() -> None:
    tracer = ScoreTracer({8}, [])
    with tracer:
        scores, _ = softmax(HIDDEN)
        again = scores @ WEIGHT
        plain = HIDDEN.softmax(-1)
    assert tracer.steps(again) == ("logits",)
    assert tracer.steps(plain) == ()
    tracer = ScoreTracer({8}, [])
    with tracer:
        made = softmax(HIDDEN)
    assert len(tracer._steps) == 2
    del made
    assert len(tracer._steps) == 0
