"""Penalties by hand; their expected gradients, on and off policy, against that of the divergence itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support.sequences import INF, NAN, Run, every, row
from torchrl_moe.objectives import functional as F

LOGITS, OTHER = row(0.3, -0.2, 0.9), row(0.2, 0.5, 0.3).log()
SAMPLER = row(0.6, 0.3, 0.1).log()


def expected_gradient(sampler: Tensor | None, estimator: F.KLEstimator, weighted: bool = False) -> Tensor:
    """``E_μ`` of a penalty's gradient, summed over all three tokens there are; on policy without a sampler."""
    logits = LOGITS.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    mu = log_p.detach() if sampler is None else sampler
    penalty, _ = F.kl_penalty(log_p, OTHER, every(3), estimator, log_p - mu if weighted else None)
    return torch.autograd.grad((mu.exp() * penalty).sum(), logits)[0]


def divergence_gradient(reverse: bool) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    first, second = (log_p, OTHER) if reverse else (OTHER, log_p)
    return torch.autograd.grad((first.exp() * (first - second)).sum(), logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sampler", [None, SAMPLER])
def test_weighted_penalties_have_the_gradient_of_the_divergence(estimator: F.KLEstimator, sampler: Tensor) -> None:
    torch.testing.assert_close(expected_gradient(sampler, estimator, weighted=True), divergence_gradient(reverse=True))


def test_plain_penalties_on_policy() -> None:
    torch.testing.assert_close(expected_gradient(None, "k1"), torch.zeros_like(LOGITS))
    torch.testing.assert_close(expected_gradient(None, "k2"), divergence_gradient(reverse=True))
    torch.testing.assert_close(expected_gradient(None, "k3"), divergence_gradient(reverse=False))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_plain_penalties_off_policy_are_of_neither(estimator: F.KLEstimator) -> None:
    got = expected_gradient(SAMPLER, estimator)
    for reverse in (True, False):
        assert not torch.allclose(got, divergence_gradient(reverse), atol=1e-2)


def test_kl_penalty(run: Run) -> None:
    mask, other = torch.tensor([[True, True, True, False]]), row(-1, -1 - math.log(2), NAN, -9)
    log_probs, log_ratio = row(-1, -1, -1, -1), row(0, math.log(3), 0, 0)
    golden: dict[F.KLEstimator, float] = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}
    for estimator, value in golden.items():
        penalty, known = run(F.kl_penalty)(log_probs, other, mask, estimator)
        assert penalty[0].tolist() == pytest.approx([0, value, 0, 0])
        assert known.tolist() == [[True, True, False, False]]
        weighted, _ = run(F.kl_penalty)(log_probs, other, mask, estimator, log_ratio)
        assert weighted[0].tolist() == pytest.approx([0, 3 * value, 0, 0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_penalty_can_be_bounded(estimator: F.KLEstimator, weighted: bool) -> None:
    """The weight counts: its product with the penalty is what the loss holds. What is inside is as it was."""
    log_probs, log_ratio = row(-25, -1, -0.1), row(12, 0.5, 3) if weighted else None
    other = row(-5.1, -1.5, -19)
    bounded = log_probs.clone().requires_grad_()
    penalty, known = F.kl_penalty(bounded, other, every(3), estimator, log_ratio, clamp=10.0)
    plain, _ = F.kl_penalty(log_probs, other, every(3), estimator, log_ratio)
    assert known.all()
    assert penalty.detach().tolist() == plain.clamp(-10, 10).tolist()
    assert plain.abs()[0].tolist()[0] > 10
    (gradient,) = torch.autograd.grad(penalty.sum(), bounded)
    free = log_probs.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(F.kl_penalty(free, other, every(3), estimator, log_ratio)[0].sum(), free)
    assert gradient.tolist() == torch.where(plain.abs() > 10, 0, wanted).tolist()
    assert gradient[0, 1] != 0


def test_a_penalty_in_the_reward(run: Run) -> None:
    log_probs = row(-1, -1, NAN, -1).requires_grad_()
    reward = run(F.kl_reward)(log_probs, row(-1.5, -0.5, -1, -INF), every(4), 0.1)
    assert reward[0].tolist() == pytest.approx([-0.05, 0.05, 0, 0])
    assert not reward.requires_grad


def test_trust_region(run: Run) -> None:
    mask = torch.tensor([[True, True, True, False]])
    inside = run(F.trust_region)(row(-1, -1, -1, -1), row(-2, -2.1, NAN, -1), mask, threshold=0.5)
    assert inside.tolist() == [[True, False, False, False]]


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"estimator must be one of \['k1', 'k2', 'k3'\], got 'k4'"):
        F.kl_penalty(OTHER, OTHER, every(3), "k4")  # type: ignore[arg-type]
