"""The maths of the losses: golden numbers worked out by hand, gradients, and invariances; eager and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
THREE = torch.tensor([[True, True, True, False]])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (sequence_sum, (VALUE, MASK), [4, 4, 4, 5, 5, 5, 0, 0, 0]),
        (sequence_mean, (VALUE, MASK), [2, 2, 2, 5, 5, 5, 0, 0, 0]),
        (F.entropy_bonus, (row(2, 0), 0.5), [-1, 0]),  # a reward
        (F.aggregate, (LOSSES, COUNTED, "none"), [1, 3, 0, 5, 0, 0]),
        (lambda *x: F.sequence_log_ratio(*x).exp(), (row(4, 1, 9).log(), COUNTED[:1]), [2, 2, 2]),
        (lambda *x: F.sequence_log_ratio(*x).exp(), (row(0.5, 9, 9).log(), COUNTED[1:]), [0.5, 0.5, 0.5]),
        (F.token_weight, (LOG_RHO,), [3, 0.5, 9, 1.25, 9, 9]),
        (F.sequence_weight, (LOG_RHO, COUNTED), [1.5] * 3 + [1.25] * 3),
        (F.weight_within, (row(0.49, 0.5, 5, 5.01), 0.5, 5.0), [0, 1, 1, 0]),
        (F.geometric_mean_within, (LOG_RHO, COUNTED, 0.9, ROOT + 1e-6), [1] * 3 + [0] * 3),
        (F.geometric_mean_within, (LOG_RHO, COUNTED, ROOT - 1e-6, 1.26), [1] * 6),
        (F.geometric_mean_within, (LOG_RHO, COUNTED, ROOT + 1e-6, 1.26), [0] * 3 + [1] * 3),
        (F.k3_mean_below, (LOG_RHO, COUNTED, K3[0] + 1e-6), [1] * 6),
        (F.k3_mean_below, (LOG_RHO, COUNTED, K3[0] - 1e-6), [0] * 3 + [1] * 3),
        (F.k3_mean_below, (LOG_RHO, COUNTED, K3[1] - 1e-6), [0] * 6),
        (F.staleness_weight, (torch.tensor([[0, 1, 2, 8]]),), [1, 1, 0.5, 0.125]),
        (F.trust_region, (row(-1, -1, -1, -1), row(-2, -2.1, NAN, -1), THREE, 0.5), [1, 0, 0, 0]),
        (F.clipped_surrogate, (RATIO.log(), ADVANTAGE, 0.2, 0.28), [-2.56, 3.0, -1.0, 1.6, -2.2, 2.2]),
        (F.outside_clip_range, (row(0.79, 0.81, 1.27, 1.29).log(), 0.2, 0.28), [1, 0, 0, 1]),
        (F.cispo_surrogate, (row(0.01, 9).log(), row(-1, -1), row(1, 1), 1.0, 4.0), [0.01, 5]),  # bounded above only
        (F.outside_divergence, (NEW.log(), OLD.log(), SIGNS, 0.15, 0.15), [1, 0, 0, 1, 0]),  # the last by 0.04
        (F.outside_divergence, (NEW.log(), OLD.log(), SIGNS, 0.15, 0.25), [0, 0, 0, 1, 0]),
        (
            F.sapo_surrogate,
            (row(1.5, 0.5, 1).log(), row(2, -1, 0), 1.0, 1.05),
            [-4 * sigmoid(0.5) * 2, 4 / 1.05 * sigmoid(-0.525), 0],
        ),
    ],
)
def test_golden_numbers(function: Any, arguments: tuple[Any, ...], expected: list[float], run: Run) -> None:
    assert run(function)(*arguments).flatten().tolist() == pytest.approx(expected)


def test_what_is_not_selected_has_no_gradient() -> None:
    value = VALUE.clone().requires_grad_()
    (select(MASK, value).sum() + sequence_mean(value, MASK).sum()).backward()
    assert value.grad.tolist() == [[1 + 1.5, 1 + 1.5, 0], [1 + 3, 0, 0], [0, 0, 0]]


# -- aggregation -------------------------------------------------------------------------------------------------------


GOLDEN = {"token_mean": 9 / 3, "prompt_mean": (2 + 5) / 2, "sequence_mean": (2 + 5) / 2, "fixed_length": 9 / (2 * 4)}


def aggregate(value: Tensor, mask: Tensor, how: Any, **totals: Any) -> Tensor:
    return F.aggregate(value, mask, how, fixed_length=4 if how == "fixed_length" else None, **totals)


@pytest.mark.parametrize("how", GOLDEN)
def test_aggregate(how: str, run: Run) -> None:
    assert run(aggregate)(LOSSES, COUNTED, how).item() == pytest.approx(GOLDEN[how])
    assert aggregate(LOSSES, COUNTED & False, how).item() == 0


def test_a_sequence_without_tokens_counts_in_prompt_mean_only() -> None:
    value, mask = torch.cat([LOSSES, LOSSES[:1]]), torch.cat([COUNTED, COUNTED[:1] & False])
    assert F.aggregate(value, mask, "prompt_mean").item() == pytest.approx((2 + 5) / 3)
    assert F.aggregate(value, mask, "sequence_mean").item() == pytest.approx((2 + 5) / 2)


@given(st.integers(0, 10_000), st.sampled_from(sorted(GOLDEN)), st.integers(0, 3), st.integers(0, 3))
def test_pads_order_and_split_change_nothing(seed: int, how: str, left: int, right: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 4, generator=generator) < 0.6
    whole = aggregate(value, mask, how)
    padded = torch.nn.functional.pad(value, (left, right), value=NAN)
    torch.testing.assert_close(aggregate(padded, torch.nn.functional.pad(mask, (left, right)), how), whole)
    order = torch.randperm(5, generator=generator)
    torch.testing.assert_close(aggregate(value[order], mask[order], how), whole)
    totals = {"num_tokens": mask.sum(), "num_sequences": F.sequence_count(mask, how)}
    cut = int(torch.randint(0, 6, (), generator=generator))
    parts = [aggregate(value[part], mask[part], how, **totals) for part in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(parts), whole)


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


def test_a_dropped_token_has_no_gradient() -> None:
    log_probs = row(-1, -2, NAN).requires_grad_()
    ratio, _ = F.log_ratio(log_probs, row(-1, NAN, -1), every(3))
    ratio.exp().sum().backward()
    assert log_probs.grad.tolist() == [[1, 0, 0]]


def test_the_gradient_of_a_sequence_is_shared_or_each_token_s_own(run: Run) -> None:
    mask, pick = torch.tensor([[True, True, False]]), torch.tensor([1.0, 0.0, 0.0])
    log_ratio = row(4, 1, 9).log().requires_grad_()
    for per_token, expected in ((False, [1.0, 1.0, 0.0]), (True, [2.0, 0.0, 0.0])):
        ratio = run(F.sequence_log_ratio)(log_ratio, mask, per_token).exp()
        torch.testing.assert_close(ratio[0, :2].detach(), torch.full((2,), 2.0, dtype=torch.float64))
        (gradient,) = torch.autograd.grad((ratio * pick).sum(), log_ratio)
        assert gradient[0].tolist() == pytest.approx(expected)


def test_effective_sample_size(run: Run) -> None:
    size = run(F.effective_sample_size)
    assert size(row(2, 2, 2, 2).log(), every(4)).item() == pytest.approx(1)
    assert size(row(1, 3, 1, 1).log(), every(4)).item() == pytest.approx(36 / (4 * 12))
    first_two = torch.tensor([[True, True, False, False]])
    assert size(row(1, 3, 9, 9).log(), first_two).item() == pytest.approx(0.8)
    assert size(row(1, 1, 1, 1), ~every(4)).item() == 0
    assert math.isfinite(size(row(20, 20, 20, 20), every(4)).item())


# -- weights and masks of a mismatch -----------------------------------------------------------------------------------


def test_off_policy_negatives(run: Run) -> None:
    log_ratio = torch.tensor([[-0.3, -0.1, 9.0], [-0.1, 9.0, 9.0]])  # mean log μ - log π: 0.2 and 0.1
    advantage = torch.tensor([[-1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]])
    left_out = run(F.off_policy_negatives)(log_ratio, advantage, COUNTED, 0.15)
    assert left_out[COUNTED].tolist() == [True, False, False]
    assert F.off_policy_negatives(log_ratio, advantage, COUNTED, 0.05)[COUNTED].tolist() == [True, False, True]


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


# -- surrogates --------------------------------------------------------------------------------------------------------


def gradient(surrogate: Callable[[Tensor], Tensor], log_ratio: Tensor = RATIO.log()) -> list[float]:  # noqa: B008
    log_ratio = log_ratio.clone().requires_grad_()
    return torch.autograd.grad(surrogate(log_ratio).sum(), log_ratio)[0][0].tolist()


# -- clipped ----------------------------------------------------------------------------------------------------------


def test_what_is_at_a_limit_is_within() -> None:
    at, mask = torch.tensor([[-0.5, -0.5]]), torch.tensor([[True, True]])
    assert not F.off_policy_negatives(at, torch.tensor([[-1.0, -1.0]]), mask, 0.5).any()
    assert F.off_policy_negatives(at, torch.tensor([[-1.0, 0.0]]), mask, 0.499).tolist() == [[True, False]]
    assert not F.outside_clip_range(torch.zeros(1, 2), 0.0, 0.0).any()
    old, new = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    assert not F.outside_divergence(new, old, torch.tensor([[1.0, -1.0]]), 0.25, 0.25).any()
    assert F.outside_divergence(new, old, torch.tensor([[1.0, -1.0]]), 0.24, 0.24).all()


def test_a_dual_clip_bounds_negative_advantages_only(run: Run) -> None:
    ratio, advantage = row(5, 5, 2.5, 0.5), row(-2, 2, -2, -2)
    for bound, expected in ((3.0, [6, -2.56, 5, 1.6]), (None, [10, -2.56, 5, 1.6])):
        loss = run(F.clipped_surrogate)(ratio.log(), advantage, 0.2, 0.28, bound)
        assert loss[0].tolist() == pytest.approx(expected)
    surrogate: Any = lambda x: F.clipped_surrogate(x, advantage, 0.2, 0.28, 3.0)  # noqa: E731
    assert gradient(surrogate, ratio.log()) == pytest.approx([0, 0, 5, 0])


# -- DPPO -------------------------------------------------------------------------------------------------------------


def test_dppo_blocks_by_the_binary_kl(run: Run) -> None:
    up = 0.4 * math.log(0.4 / 0.6) + 0.6 * math.log(0.6 / 0.4)
    down = 0.4 * math.log(0.4 / 0.2) + 0.6 * math.log(0.6 / 0.8)
    for low, high, expected in (
        (down - 1e-6, up - 1e-6, [True, False, False, True, False]),
        (down + 1e-6, up - 1e-6, [True, False, False, False, False]),
        (down - 1e-6, up + 1e-6, [False, False, False, True, False]),
    ):
        assert run(F.outside_divergence)(NEW.log(), OLD.log(), SIGNS, low, high, "kl").tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_tokens_have_a_finite_divergence(dtype: torch.dtype) -> None:
    zero, certain = torch.zeros(1, 1, dtype=dtype), torch.tensor([[-1e-9]], dtype=dtype)
    assert not F.outside_divergence(zero, certain, torch.ones(1, 1), 0.05, 0.05, "kl").any()
    assert F.outside_divergence(zero, zero - 1, torch.ones(1, 1), 0.05, 0.05, "kl").all()


def test_dppo_does_not_clip_but_caps(run: Run) -> None:
    ratio, advantage = row(1.5, 50, 1.5, 0.1), row(2, 2, 2, -1)
    blocked = torch.tensor([[False, False, True, False]])
    loss = run(F.dppo_surrogate)(ratio.log(), advantage, blocked, 20.0)
    assert loss[0].tolist() == pytest.approx([-3, -40, 0, 0.1])
    surrogate: Any = lambda x: F.dppo_surrogate(x, advantage, blocked, 20.0)  # noqa: E731
    assert gradient(surrogate, ratio.log()) == pytest.approx([-3, -40, 0, 0.1])


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: F.aggregate(x, y.bool()),
        lambda x, y: F.log_ratio(x, y, x.bool()),
        lambda x, y: F.sequence_log_ratio(x, y.bool()),
        lambda x, y: F.interpolated_log_probs(x, y, x.int()),
        lambda x, y: F.effective_sample_size(x, y.bool()),
        lambda x, y: F.kl_penalty(x, y, x.bool()),
        lambda x, y: F.kl_penalty(x, x, x.bool(), "k3", y),
        lambda x, y: F.kl_reward(x, y, x.bool(), 0.1),
        lambda x, y: F.trust_region(x, y, x.bool(), 1.0),
        lambda x, y: F.clipped_surrogate(x, y, 0.2, 0.2),
        lambda x, y: F.cispo_surrogate(x, x, y, 0.2, 0.2),
        lambda x, y: F.outside_divergence(x, y, x, 0.2, 0.2),
        lambda x, y: F.dppo_surrogate(x, x, y.bool(), 20.0),
        lambda x, y: F.sapo_surrogate(x, y),
        lambda x, y: F.sequence_weight(x, y.bool()),
        lambda x, y: F.geometric_mean_within(x, y.bool(), 0.9, 1.1),
        lambda x, y: F.k3_mean_below(x, y.bool(), 0.1),
        lambda x, y: F.off_policy_negatives(x, y, x.bool(), 0.1),
    ],
)
def test_two_tensors_of_other_shapes_are_refused(call: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(ValueError, match="must have 2 dimensions, got 3"):
        call(torch.ones(2, 3, 1), torch.ones(2, 3, 1))
    with pytest.raises(ValueError, match=r"must have the same shape, got .*\[2, 1\]"):
        call(torch.ones(2, 3), torch.ones(2, 1))


@pytest.mark.parametrize(
    "call",
    [
        F.token_weight,
        F.staleness_weight,
        lambda x: F.weight_within(x, 0.0, 1.0),
        lambda x: F.entropy_bonus(x, 1.0),
        lambda x: F.sequence_count(x, "token_mean"),
        lambda x: F.outside_clip_range(x, 0.2, 0.2),
    ],
)
def test_a_tensor_without_tokens_is_refused(call: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"\w+ must have 2 dimensions, got 1: shape \[3\]. It is \[B, T\]"):
        call(torch.ones(3))
