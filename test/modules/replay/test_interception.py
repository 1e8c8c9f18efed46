"""A router's ``topk`` is answered; what it does with the answer is its own, and equals formulas written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modules.replay.cases import (
    FAMILIES,
    assert_same,
    backward,
    experts_seen,
    gradients,
    loss_of,
    pair,
    random_routes,
    tokens,
)
from modules.replay.gating import reference_routing
from torchrl_moe.modules.replay.interception import TopKInterception, TopKObserver
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing import make_tiny_moe

SCORES = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.0, 0.1, 0.2]])
GIVEN = torch.tensor([[2, 0], [3, 1]])


def given(*_: object) -> Tensor:
    return GIVEN


# topk


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
    ids=["k", "width", "dim", "rank", "sort", "max"],
)
def test_any_other_call_is_left_alone(call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    with TopKInterception(4, 2, 2, given, given):
        got = call(SCORES)
    for one, other in zip(got, call(SCORES), strict=True):
        assert torch.equal(one, other)


def test_the_routers_own_choice_comes_without_a_graph() -> None:
    own_choices = []

    def choose(scores: Tensor, own: Callable[[], torch.return_types.topk]) -> Tensor:
        assert torch.equal(scores, SCORES)
        own_choices.append(own())
        return own_choices[-1].indices

    with TopKInterception(4, 2, 2, choose):
        values, experts = SCORES.clone().requires_grad_().topk(2)
    assert torch.equal(experts, SCORES.topk(2).indices)
    assert torch.equal(values, SCORES.topk(2).values)
    assert not own_choices[0].values.requires_grad
    assert values.requires_grad


def test_groups_are_opened_before_the_experts_are_chosen_and_not_after() -> None:
    seen = []

    def groups(scores: Tensor, _: object) -> Tensor:
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
    told: list[tuple[Tensor, int]] = []
    with TopKObserver(lambda x, k: told.append((x, k))):
        got = SCORES.topk(2)
        SCORES.topk(1, dim=0)
        SCORES.sort(-1)
    assert torch.equal(got.values, SCORES.topk(2).values)
    assert [(x.shape, k) for x, k in told] == [((2, 4), 2)]


# in models


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_models_own_routes_is_bit_equal_in_logits_and_gradients(family: str, mode: str) -> None:
    model = make_tiny_moe(family).train(mode == "train")
    logits, grads = backward(model, tokens())
    replayed, replay = pair(family)
    replayed.train(mode == "train")
    with replay.record() as recording:
        recorded_logits, recorded_grads = backward(replayed, tokens())
    with replay.replay(recording.routed_experts):
        replayed_logits, replayed_grads = backward(replayed, tokens())
    assert torch.equal(logits, recorded_logits)
    assert torch.equal(logits, replayed_logits)
    assert_same(recorded_grads, grads)
    assert_same(replayed_grads, grads)


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_random_routes_equals_the_formula_of_the_family(family: str) -> None:
    model, replay = pair(family)
    routes = random_routes(replay)
    with experts_seen(model) as seen, replay.replay(routes):
        logits = model(tokens()).logits
    loss_of(logits).backward()  # the context is closed
    grads = gradients(model)
    replay.remove()
    with experts_seen(model) as wanted, reference_routing(model, routes):
        wanted_logits, wanted_grads = backward(model, tokens())
    assert seen.keys() == wanted.keys() == set(replay.layers)
    for layer, (experts, weights) in wanted.items():
        assert torch.equal(seen[layer][0], experts)
        assert torch.equal(experts, routes[:, :, layer].flatten(0, 1))
        torch.testing.assert_close(seen[layer][1], weights, atol=1e-6, rtol=0)
        assert (weights > 0).all()
    torch.testing.assert_close(logits, wanted_logits, atol=1e-6, rtol=0)
    assert_same(grads, wanted_grads, atol=1e-6)
    routers = [grads[f"{site.name}.weight"] for site in replay.sites]
    assert all(grad.abs().max() > 1e-2 for grad in routers)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_router_gradients_under_replay_equal_finite_differences(family: str) -> None:
    model = make_tiny_moe(family, dtype=torch.float64)
    model.set_experts_implementation("eager")  # grouped_mm takes no float64
    replay = RouterReplay(model)
    routes = random_routes(replay)
    routers = [model.get_submodule(site.name).weight for site in replay.sites]
    generator = torch.Generator().manual_seed(5)
    direction = [torch.randn(weight.shape, generator=generator).to(weight.dtype) for weight in routers]

    def loss() -> Tensor:
        with replay.replay(routes):
            return loss_of(model(tokens()).logits)

    @torch.no_grad()
    def moved(step: float) -> float:
        for weight, move in zip(routers, direction, strict=True):
            weight.add_(move, alpha=step)
        return loss().item()

    loss().backward()
    slope = sum((weight.grad * move).sum().item() for weight, move in zip(routers, direction, strict=True))
    step = 1e-3
    difference = (moved(step) - moved(-2 * step)) / (2 * step)
    assert abs(slope) > 0.05
    assert difference == pytest.approx(slope, rel=1e-3)
