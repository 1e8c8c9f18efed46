"""An optimizer step is that of the whole minibatch, whatever its parts."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor

from support.rollouts import BigramActor, dense, ragged, samples
from torchrl_moe.errors import DivergedError
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.trainers.learner import TokenStepper, lengths_of

SHAPES = [(2, 3), (1, 7), (3, 2), (2, 5), (4, 1), (1, 4)]


def stepper_of(loss: GRPOLoss, max_tokens: int | None = None, **changes: Any) -> TokenStepper:
    optimizer = torch.optim.SGD(loss.actor_network.parameters(), lr=0.5)
    options: dict[str, Any] = {"max_grad_norm": None, "precision": nullcontext, **changes}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return TokenStepper(loss, optimizer, schedule, max_tokens=max_tokens, **options)


def gradient(max_tokens: int | None, batch: TensorDictBase, **loss: Any) -> tuple[Tensor, dict[str, Tensor], int]:
    actor = BigramActor()
    metrics = stepper_of(GRPOLoss(actor, **loss), max_tokens).accumulate(batch)
    assert actor.logits.grad is not None
    return actor.logits.grad, metrics, len(actor.calls)


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize(("max_tokens", "parts"), [(24, 2), (8, 6), (12, 4)])
def test_parts_change_no_gradient(max_tokens: int, parts: int, aggregation: Any) -> None:
    options = {"entropy_bonus": False, "aggregation": aggregation}
    whole, metrics, calls = gradient(None, ragged(samples(SHAPES)), **options)
    split, of_parts, more = gradient(max_tokens, ragged(samples(SHAPES)), **options)
    assert (calls, more) == (1, parts)
    torch.testing.assert_close(split, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(of_parts["loss_objective"], metrics["loss_objective"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("max_tokens", [None, 10, 1])
@pytest.mark.parametrize("form", ["contiguous", "padded"])
def test_a_dense_batch_has_the_gradient_of_its_rows(form: str, max_tokens: int | None) -> None:
    rollouts = samples([(2, 3)] * 6)
    for rollout in rollouts[2:]:
        rollout["advantage"] = torch.zeros_like(rollout["advantage"])  # left out, so the default splits too
    wanted, _, _ = gradient(None, ragged(rollouts), entropy_bonus=False)
    batch = ragged(rollouts).contiguous() if form == "contiguous" else dense(rollouts, left=1, right=2)
    batch["tokens", "response"] = batch["tokens", "full"][:, -3:]
    found, _, _ = gradient(max_tokens, batch, entropy_bonus=False)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_samples_without_an_advantage_are_not_computed_and_change_no_gradient() -> None:
    rollouts = samples(SHAPES)
    for rollout in rollouts[::2]:
        rollout["advantage"] = torch.zeros_like(rollout["advantage"])
    with_all, _, _ = gradient(None, ragged(rollouts), entropy_coeff=0.0, entropy_bonus=True)
    without, _, calls = gradient(6, ragged(rollouts), entropy_bonus=False)
    assert calls == 3
    torch.testing.assert_close(without, with_all, atol=1e-12, rtol=0)


def test_a_batch_without_any_advantage_still_has_metrics() -> None:
    rollouts = samples(SHAPES[:2])
    for rollout in rollouts:
        rollout["advantage"] = torch.zeros_like(rollout["advantage"])
    found, metrics, _ = gradient(None, ragged(rollouts), entropy_bonus=False)
    assert not found.any()
    assert {"loss_objective", "kl_approx", "ESS"} <= metrics.keys()


def test_a_step_moves_the_weights_and_the_learning_rate() -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False)
    stepper = stepper_of(loss, max_tokens=10)
    before = loss.actor_network.logits.detach().clone()
    wanted, _, _ = gradient(None, ragged(samples(SHAPES)), entropy_bonus=False)
    out = stepper.step(None, ragged(samples(SHAPES)))  # type: ignore[arg-type]
    torch.testing.assert_close(loss.actor_network.logits.detach(), before - 0.5 * wanted)
    torch.testing.assert_close(out["grad_norm"], wanted.norm().float())
    assert (out["lr"].item(), stepper.lr) == (0.5, 0.25)
    metrics = stepper.take_metrics()
    assert metrics["loss"] == pytest.approx(out["loss_objective"].item())
    assert metrics["ess"] == pytest.approx(out["ESS"].item())
    assert stepper.take_metrics() == {}


def test_a_gradient_is_scaled_down_to_its_greatest_norm() -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False)
    before = loss.actor_network.logits.detach().clone()
    stepper_of(loss, max_grad_norm=1e-3).step(None, ragged(samples(SHAPES)))  # type: ignore[arg-type]
    assert (loss.actor_network.logits.detach() - before).norm().item() == pytest.approx(0.5e-3, rel=1e-3)


def test_a_gradient_that_is_not_finite_is_skipped_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False)
    stepper = stepper_of(loss)
    before = loss.actor_network.logits.detach().clone()
    handle = loss.actor_network.logits.register_hook(lambda grad: grad * float("inf"))
    stepper.step(None, ragged(samples(SHAPES)))  # type: ignore[arg-type]
    handle.remove()
    assert torch.equal(loss.actor_network.logits, before)
    assert (stepper.skipped, stepper.lr) == (1, 0.5)
    assert "the step is skipped, 1 so far" in caplog.text
    assert loss.actor_network.logits.grad is None


def test_too_many_bad_steps_in_a_row_end_the_run() -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False)
    stepper = stepper_of(loss, max_bad_steps=2)
    factors = iter((math.nan, 1.0, math.inf, math.nan))
    loss.actor_network.logits.register_hook(lambda grad: grad * next(factors))
    for _ in range(3):
        stepper.step(None, ragged(samples(SHAPES)))  # type: ignore[arg-type]
    with pytest.raises(DivergedError, match=r"optim\.max_bad_steps=2 gradients in a row are not finite"):
        stepper.step(None, ragged(samples(SHAPES)))  # type: ignore[arg-type]
    assert stepper.skipped == 3


def test_weights_that_are_not_finite_end_the_run() -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False)
    stepper = stepper_of(loss)
    weight = loss.actor_network.logits.detach()
    stepper.optimizer.register_step_post_hook(lambda *_: weight.__setitem__(0, math.inf))
    with pytest.raises(DivergedError, match="the weights are not finite after this step"):
        stepper.step(None, ragged(samples(SHAPES)))  # type: ignore[arg-type]


def test_it_continues_from_its_state() -> None:
    stepper = stepper_of(GRPOLoss(BigramActor(), entropy_bonus=False))
    stepper.step(None, ragged(samples(SHAPES)))  # type: ignore[arg-type]
    stepper.skipped = 3
    other = stepper_of(GRPOLoss(BigramActor(), entropy_bonus=False))
    other.load_state_dict(stepper.state_dict())
    assert (other.skipped, other.schedule.last_epoch) == (3, 1)


def test_lengths_are_of_prompt_and_answer() -> None:
    assert lengths_of(ragged(samples([(2, 3), (1, 7)]))) == [5, 8]
