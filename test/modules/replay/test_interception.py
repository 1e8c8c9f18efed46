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
)

Call = Callable[[Tensor], Any]
Ranked = tuple[Tensor, Tensor]
SCORES = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.0, 0.1, 0.2]])
GIVEN = torch.tensor([[2, 0], [3, 1]])


def given(*_: object) -> Tensor:
    return GIVEN


TOP_2: tuple[Call, ...] = (
    lambda x: torch.topk(x, 2),
    lambda x: torch.topk(input=x, k=2, dim=1, sorted=False),
    lambda x: x.topk(2),
    lambda x: x.topk(k=2, dim=-1),
)
OTHERS: tuple[Call, ...] = (
    lambda x: x.topk(3),
    lambda x: x[:, :3].topk(2),
    lambda x: x.T.topk(2, dim=0),
    lambda x: x.T.topk(2, 0),
    lambda x: x[:, None].topk(2),
    lambda x: x.sort(-1),
    lambda x: x.max(-1),
)
TOP_1: tuple[tuple[Call, int], ...] = (
    (lambda x: x.topk(1), 0),
    (lambda x: x.topk(1, -1, False), 1),
    (lambda x: torch.topk(x, 1, -1, largest=False, sorted=False), 1),
    (lambda x: x.topk(1, dim=-1, largest=True), 0),
)


@pytest.mark.parametrize("call", TOP_2)
def test_topk_answers_with_the_given_experts_and_their_live_scores(call: Call) -> None:
    scores = SCORES.clone().requires_grad_()
    with TopKInterception(4, 2, 2, given):
        values, experts = call(scores)
    assert experts.tolist() == GIVEN.tolist()
    torch.testing.assert_close(values, torch.tensor([[0.2, 0.1], [0.2, 0.0]]))
    values.sum().backward()
    assert scores.grad.tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize("call", OTHERS)
def test_any_other_call_is_left_alone(call: Call) -> None:
    with TopKInterception(4, 2, 2, given, given):
        got = call(SCORES)
    assert all(map(torch.equal, got, call(SCORES)))


@pytest.mark.parametrize(("call", "wanted"), TOP_1)
def test_the_routers_own_choice_of_some_rows_is_that_of_its_call(call: Call, wanted: int) -> None:
    own_choices = []

    def choose(_: Tensor, own: OwnChoice) -> Tensor:
        own_choices.append(own(torch.tensor([1])).indices)
        return GIVEN[:, :1]

    for shape in ((2, 4), (1, 2, 4)):
        with TopKInterception(4, 1, len(shape), choose):
            call(SCORES.view(shape))
        assert own_choices.pop().tolist() == [[wanted]]


@pytest.mark.parametrize("call", [lambda x: x.topk(8, sorted=False), lambda x: torch.topk(x, 8, -1, True, False)])
def test_its_order_is_kept_too(call: Call) -> None:
    """In which experts are added up: with another one a live row's output is not the model's, by rounding."""
    scores = torch.rand(64, 16, generator=torch.Generator().manual_seed(0))
    own_choices = []

    def choose(x: Tensor, own: OwnChoice) -> Tensor:
        own_choices.append(own(torch.arange(32)).indices)
        return x.argsort(-1)[:, :8]

    with TopKInterception(16, 8, 2, choose):
        call(scores)
    assert torch.equal(own_choices[0], call(scores)[1][:32])
    assert not torch.equal(own_choices[0], scores.topk(8).indices[:32])


# -- the steps from logits to topk, and from there to weights, are seen as they happen


HIDDEN = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def softmax(x: Tensor) -> Ranked:
    scores = F.linear(x, WEIGHT).softmax(-1)
    return scores, scores.topk(2).values


def test_a_matrix_product_begins_again_and_tensors_are_not_kept_alive() -> None:
    with ScoreTracer({8}, []) as tracer:
        made = softmax(HIDDEN)
        again, plain = made[0] @ WEIGHT, HIDDEN.softmax(-1)
    assert (tracer.steps(again), tracer.steps(plain)) == (("logits",), ())
    kept = len(tracer._steps)
    del made
    assert len(tracer._steps) == kept - 2
