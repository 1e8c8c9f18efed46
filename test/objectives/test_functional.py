"""The maths of the losses: golden numbers worked out by hand, gradients, and invariances; eager and compiled."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from support.rollouts import INF, NAN, Run, every, row
from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.functional import select, sequence_mean, sequence_sum


@pytest.fixture(params=["eager", "compiled"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a function as it is, or captured as one graph without a break."""
    if request.param == "eager":
        return lambda function: function
    torch.compiler.reset()
    return lambda function: torch.compile(function, backend="eager", fullgraph=True)


# -- sums and means over a sequence ------------------------------------------------------------------------------------

VALUE = torch.tensor([[1.0, 3.0, NAN], [5.0, 60.0, 70.0], [8.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


COUNTED = torch.tensor([[True, True, False], [True, False, False]])
LOSSES = torch.tensor([[1.0, 3.0, 50.0], [5.0, 60.0, 70.0]])
LOG_RHO = torch.tensor([[3.0, 0.5, 9.0], [1.25, 9.0, 9.0]], dtype=torch.float64).log()
"""ρ is 3 and 0.5 in one sequence, 1.25 in the other."""
ROOT = math.sqrt(1.5)
K3 = (3 - 1 - math.log(3) + 0.5 - 1 - math.log(0.5)) / 2, 1.25 - 1 - math.log(1.25)
"""Of both sequences."""
RATIO, ADVANTAGE = row(1.5, 1.5, 0.5, 0.5, 1.1, 1.1), row(2, -2, 2, -2, 2, -2)
OLD, NEW = row(0.4, 0.4, 0.4, 0.4, 0.01), row(0.6, 0.6, 0.2, 0.2, 0.05)
SIGNS = row(1, -1, 1, -1, 1)  # the second and third move back towards the old policy
UP = 0.4 * math.log(0.4 / 0.6) + 0.6 * math.log(0.6 / 0.4)
DOWN = 0.4 * math.log(0.4 / 0.2) + 0.6 * math.log(0.6 / 0.8)
"""Binary KL divergences of the first two steps."""
THREE = torch.tensor([[True, True, True, False]])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


GOLDEN: list[tuple[Any, tuple[Any, ...], list[float]]] = [
    (sequence_sum, (VALUE, MASK), [4, 4, 4, 5, 5, 5, 0, 0, 0]),
    (sequence_mean, (VALUE, MASK), [2, 2, 2, 5, 5, 5, 0, 0, 0]),
    (F.entropy_bonus, (row(2, 0), 0.5), [-1, 0]),  # a reward
    (F.aggregate, (LOSSES, COUNTED, "none"), [1, 3, 0, 5, 0, 0]),
    (F.aggregate, (LOSSES, COUNTED, "token_mean"), [9 / 3]),
    (F.aggregate, (VALUE, MASK, "prompt_mean"), [(2 + 5) / 3]),  # a sequence without tokens counts here only
    (F.aggregate, (VALUE, MASK, "sequence_mean"), [(2 + 5) / 2]),
    (lambda *x: F.aggregate(*x, fixed_length=4), (LOSSES, COUNTED, "fixed_length"), [9 / (2 * 4)]),
    (F.effective_sample_size, (row(2, 2, 2, 2).log(), every(4)), [1]),
    (F.effective_sample_size, (row(1, 3, 1, 1).log(), every(4)), [36 / (4 * 12)]),
    (F.effective_sample_size, (row(1, 3, 9).log(), COUNTED[:1]), [0.8]),
    (F.effective_sample_size, (row(1, 1, 1).log(), COUNTED[:1] & False), [0]),
    (F.effective_sample_size, (row(20, 20), every(2)), [1]),
    (lambda *x: F.sequence_log_ratio(*x).exp(), (row(4, 1, 9).log(), COUNTED[:1]), [2, 2, 2]),
    (lambda *x: F.sequence_log_ratio(*x, True).exp()[:, :2], (row(4, 1, 9).log(), COUNTED[:1]), [2, 2]),
    (F.token_weight, (LOG_RHO,), [3, 0.5, 9, 1.25, 9, 9]),
    (F.sequence_weight, (LOG_RHO, COUNTED), [1.5] * 3 + [1.25] * 3),
    (F.weight_within, (row(0.49, 0.5, 5, 5.01), 0.5, 5.0), [0, 1, 1, 0]),
    (F.geometric_mean_within, (LOG_RHO, COUNTED, ROOT - 1e-6, 1.26), [1] * 6),
    (F.geometric_mean_within, (LOG_RHO, COUNTED, ROOT + 1e-6, 1.26), [0] * 3 + [1] * 3),
    (F.k3_mean_below, (LOG_RHO, COUNTED, K3[0] - 1e-6), [0] * 3 + [1] * 3),
    (F.k3_mean_below, (row(0, 0), every(2), 0.0), [1, 1]),  # the limit itself is within
    (F.staleness_weight, (torch.tensor([[0, 1, 2, 8]]),), [1, 1, 0.5, 0.125]),
    (F.trust_region, (row(-1, -1, -1, -1), row(-2, -2.1, NAN, -1), THREE, 0.5), [1, 0, 0, 0]),
    (F.clipped_surrogate, (RATIO.log(), ADVANTAGE, 0.2, 0.28), [-2.56, 3.0, -1.0, 1.6, -2.2, 2.2]),
    (F.outside_clip_range, (row(0.79, 0.81, 1.27, 1.29).log(), 0.2, 0.28), [1, 0, 0, 1]),
    (F.cispo_surrogate, (row(0.01, 9).log(), row(-1, -1), row(1, 1), 1.0, 4.0), [0.01, 5]),  # bounded above only
    (F.outside_divergence, (NEW.log(), OLD.log(), SIGNS, 0.15, 0.15), [1, 0, 0, 1, 0]),  # the last by 0.04
    (F.outside_divergence, (row(1).log(), row(0.5).log(), row(1), 0.0, 0.5), [0]),  # the bound itself is inside
    (F.outside_divergence, (row(0.5).log(), row(1).log(), row(-1), 0.5, 0.0), [0]),
    (F.outside_divergence, (NEW.log(), OLD.log(), 0 * SIGNS, 0.01, 0.01), [0] * 5),  # nothing to move
    (F.outside_divergence, (NEW.log(), OLD.log(), SIGNS, DOWN - 1e-6, UP - 1e-6, "kl"), [1, 0, 0, 1, 0]),
    (F.outside_divergence, (NEW.log(), OLD.log(), SIGNS, DOWN + 1e-6, UP - 1e-6, "kl"), [1, 0, 0, 0, 0]),
    (F.outside_divergence, (NEW.log(), OLD.log(), SIGNS, DOWN - 1e-6, UP + 1e-6, "kl"), [0, 0, 0, 1, 0]),
    (
        F.sapo_surrogate,
        (row(1.5, 0.5, 1).log(), row(2, -1, 0), 1.0, 1.05),
        [-4 * sigmoid(0.5) * 2, 4 / 1.05 * sigmoid(-0.525), 0],
    ),
]


@pytest.mark.parametrize(("function", "arguments", "expected"), GOLDEN)
def test_golden_numbers(function: Any, arguments: tuple[Any, ...], expected: list[float]) -> None:
    assert function(*arguments).flatten().tolist() == pytest.approx(expected)


def test_golden_numbers_as_one_graph() -> None:
    torch.compiler.reset()
    all_of_them = torch.compile(lambda: [f(*given) for f, given, _ in GOLDEN], backend="eager", fullgraph=True)
    for place, (found, (*_, expected)) in enumerate(zip(all_of_them(), GOLDEN, strict=True)):
        assert found.flatten().tolist() == pytest.approx(expected), place


def test_what_is_not_selected_or_dropped_has_no_gradient() -> None:
    value = VALUE.clone().requires_grad_()
    (select(MASK, value).sum() + sequence_mean(value, MASK).sum()).backward()
    assert value.grad.tolist() == [[1 + 1.5, 1 + 1.5, 0], [1 + 3, 0, 0], [0, 0, 0]]
    log_probs = row(-1, -2, NAN).requires_grad_()
    F.log_ratio(log_probs, row(-1, NAN, -1), every(3))[0].exp().sum().backward()
    assert log_probs.grad.tolist() == [[1, 0, 0]]


def test_unknown_aggregations_and_estimators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"aggregation must be one of \['token_mean', .*\], got 'mean'"):
        F.aggregate(LOSSES, COUNTED, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="aggregation='fixed_length' needs fixed_length"):
        F.aggregate(LOSSES, COUNTED, "fixed_length")
    with pytest.raises(ValueError, match=r"estimator must be one of \['k1', 'k2', 'k3'\], got 'k4'"):
        F.kl_penalty(OTHER, OTHER, every(3), "k4")  # type: ignore[arg-type]


# -- ratios of policies ------------------------------------------------------------------------------------------------


def test_log_ratio_drops_what_is_not_finite_and_is_cut_at_20(run: Run) -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    ratio, known = run(F.log_ratio)(row(-1, NAN, -1, -INF, -1), row(-1.5, -1, NAN, -1, -9), mask)
    assert ratio.tolist() == [[0.5, 0, 0, 0, 0]]
    assert known.tolist() == [[True, False, False, False, False]]
    ratio, known = run(F.log_ratio)(row(-1, -60), row(-50, -1), every(2))
    assert ratio.tolist() == [[20, -20]]
    assert known.all()


# -- penalties ---------------------------------------------------------------------------------------------------------

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


def test_a_penalty_in_the_reward(run: Run) -> None:
    log_probs = row(-1, -1, NAN, -1).requires_grad_()
    reward = run(F.kl_reward)(log_probs, row(-1.5, -0.5, -1, -INF), every(4), 0.1)
    assert reward[0].tolist() == pytest.approx([-0.05, 0.05, 0, 0])
    assert not reward.requires_grad


# -- surrogates --------------------------------------------------------------------------------------------------------


def test_what_is_at_a_limit_is_within() -> None:
    log_ratio = torch.tensor([[-0.3, -0.1, 9.0], [-0.1, 9.0, 9.0]])  # mean log μ - log π: 0.2 and 0.1
    advantage = torch.tensor([[-1.0, 1.0, -1.0], [-1.0, 0.0, -1.0]])
    assert F.off_policy_negatives(log_ratio, advantage, COUNTED, 0.15)[COUNTED].tolist() == [True, False, False]
    assert F.off_policy_negatives(log_ratio, advantage, COUNTED, 0.05)[COUNTED].tolist() == [True, False, True]
    at = torch.full((1, 2), -0.5)
    assert not F.off_policy_negatives(at, torch.tensor([[-1.0, -1.0]]), every(2), 0.5).any()
    assert F.off_policy_negatives(at, torch.tensor([[-1.0, 0.0]]), every(2), 0.499).tolist() == [[True, False]]
    assert not F.outside_clip_range(torch.zeros(1, 2), 0.0, 0.0).any()
    old, new = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    assert not F.outside_divergence(new, old, torch.tensor([[1.0, -1.0]]), 0.25, 0.25).any()
    assert F.outside_divergence(new, old, torch.tensor([[1.0, -1.0]]), 0.24, 0.24).all()


TWOS = row(-2, 2, -2, -2)
CAPPED = (row(2, 2, 2, -1), torch.tensor([[False, False, True, False]]), 20.0)


@pytest.mark.parametrize(
    ("surrogate", "ratio", "arguments", "values", "slopes"),
    [  # a dual clip bounds negative advantages only; DPPO caps, and does not clip
        (F.clipped_surrogate, (5, 5, 2.5, 0.5), (TWOS, 0.2, 0.28, 3.0), [6, -2.56, 5, 1.6], [0, 0, 5, 0]),
        (F.clipped_surrogate, (5, 5, 2.5, 0.5), (TWOS, 0.2, 0.28), [10, -2.56, 5, 1.6], [10, 0, 5, 0]),
        (F.dppo_surrogate, (1.5, 50, 1.5, 0.1), CAPPED, [-3, -40, 0, 0.1], [-3, -40, 0, 0.1]),
    ],
)
def test_bounds_of_a_ratio(surrogate: Any, ratio: Any, arguments: Any, values: Any, slopes: Any, run: Run) -> None:
    """Values, and gradients by the log-ratio."""
    log_ratio = row(*ratio).log().requires_grad_()
    loss = run(surrogate)(log_ratio, *arguments)
    assert loss[0].tolist() == pytest.approx(values)
    assert torch.autograd.grad(loss.sum(), log_ratio)[0][0].tolist() == pytest.approx(slopes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_tokens_have_a_finite_divergence(dtype: torch.dtype) -> None:
    zero, certain = torch.zeros(1, 1, dtype=dtype), torch.tensor([[-1e-9]], dtype=dtype)
    assert not F.outside_divergence(zero, certain, torch.ones(1, 1), 0.05, 0.05, "kl").any()
    assert F.outside_divergence(zero, zero - 1, torch.ones(1, 1), 0.05, 0.05, "kl").all()


# -- shapes ------------------------------------------------------------------------------------------------------------


SHAPED = [name for name in F.__all__ if name.islower()]


@pytest.mark.parametrize("name", SHAPED)
def test_tensors_that_are_not_all_a_value_per_token_are_refused(name: str) -> None:
    function, given, tensors = getattr(F, name), {}, []
    for key, one in signature(function).parameters.items():
        if one.annotation == "Tensor" or (name, key) == ("kl_penalty", "log_ratio"):
            tensors.append(key)
            given[key] = torch.ones(2, 3, dtype=torch.bool if key in ("mask", "blocked") else torch.float32)
        elif one.default is one.empty:
            given[key] = 0.5
    for wrong in tensors:
        with pytest.raises(ValueError, match=r"must have 2 dimensions, got 3: shape .* It is \[B, T\]"):
            function(**given | {wrong: given[wrong][..., None]})
        if len(tensors) > 1:
            with pytest.raises(ValueError, match=r"must have the same shape, got .*\[2, 1\]"):
                function(**given | {wrong: given[wrong][:, :1]})


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
