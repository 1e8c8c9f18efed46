"""Golden numbers worked out by hand, gradients against naive code, invariances; eager and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchrl_moe.objectives import functional as F

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[True, True, False], [True, False, False]])
VALUE = torch.tensor([[1.0, 3.0, 50.0], [5.0, 60.0, 70.0]])
Run = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture(params=["eager", "compiled"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a function as it is, or captured as one graph without a break."""
    if request.param == "eager":
        return lambda function: function
    torch.compiler.reset()
    return lambda function: torch.compile(function, backend="eager", fullgraph=True)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


# -- log-ratio --------------------------------------------------------------------------------------------------------


def test_log_ratio_drops_what_is_not_finite(run: Run) -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    ratio, known = run(F.log_ratio)(row(-1, NAN, -1, -INF, -1), row(-1.5, -1, NAN, -1, -9), mask)
    assert ratio.tolist() == [[0.5, 0, 0, 0, 0]]
    assert known.tolist() == [[True, False, False, False, False]]


def test_log_ratio_is_cut_at_20() -> None:
    ratio, known = F.log_ratio(row(-1, -60), row(-50, -1), torch.tensor([[True, True]]))
    assert ratio.tolist() == [[20, -20]]
    assert known.all()


def test_a_dropped_token_has_no_gradient() -> None:
    log_probs = row(-1, -2, NAN).requires_grad_()
    ratio, _ = F.log_ratio(log_probs, row(-1, NAN, -1), torch.ones(1, 3, dtype=torch.bool))
    ratio.exp().sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[1, 0, 0]]


# -- clipped surrogate ------------------------------------------------------------------------------------------------


def test_clipped_surrogate_in_each_corner(run: Run) -> None:
    ratio = row(1.5, 1.5, 0.5, 0.5, 1.1, 1.1)
    advantage = row(2, -2, 2, -2, 2, -2)
    loss = run(F.clipped_surrogate)(ratio.log(), advantage, 0.2, 0.28)
    assert loss[0].tolist() == pytest.approx([-2.56, 3.0, -1.0, 1.6, -2.2, 2.2])


def test_the_clip_range_may_be_tensors_and_may_be_asymmetric() -> None:
    ratio, advantage = row(1.25, 0.75), row(1, -1)
    wide = F.clipped_surrogate(ratio.log(), advantage, torch.tensor(0.3), torch.tensor(0.28))
    assert wide[0].tolist() == pytest.approx([-1.25, 0.75])
    tight = F.clipped_surrogate(ratio.log(), advantage, torch.tensor(0.2), torch.tensor(0.2))
    assert tight[0].tolist() == pytest.approx([-1.2, 0.8])


def test_only_clipped_tokens_lose_their_gradient() -> None:
    log_ratio = row(1.5, 1.5, 0.5, 0.5, 1.1, 1.1).log().requires_grad_()
    F.clipped_surrogate(log_ratio, row(2, -2, 2, -2, 2, -2), 0.2, 0.28).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad[0].tolist() == pytest.approx([0, 3.0, -1.0, 0, -2.2, 2.2])


def test_outside_clip_range(run: Run) -> None:
    outside = run(F.outside_clip_range)(row(0.79, 0.81, 1.27, 1.29).log(), 0.2, 0.28)
    assert outside.tolist() == [[True, False, False, True]]


# -- KL, trust region, entropy, effective sample size -----------------------------------------------------------------


def test_kl_penalty(run: Run) -> None:
    mask = torch.tensor([[True, True, True, False]])
    penalty, known = run(F.kl_penalty)(row(-1, -1, -1, -1), row(-1, -1 - math.log(2), NAN, -9), mask)
    assert penalty[0].tolist() == pytest.approx([0, 0.5 - 1 + math.log(2), 0, 0])
    assert known.tolist() == [[True, True, False, False]]


def test_the_gradient_of_the_kl_penalty_is_that_of_the_reverse_divergence() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    penalty, _ = F.kl_penalty(log_p[None], other.log()[None], torch.ones(1, 3, dtype=torch.bool))
    (expected,) = torch.autograd.grad((other * (other.log() - log_p)).sum(), logits, retain_graph=True)
    (got,) = torch.autograd.grad((log_p.detach().exp() * penalty[0]).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_trust_region(run: Run) -> None:
    mask = torch.tensor([[True, True, True, False]])
    inside = run(F.trust_region)(row(-1, -1, -1, -1), row(-2, -2.1, NAN, -1), mask, threshold=0.5)
    assert inside.tolist() == [[True, False, False, False]]


def test_entropy_bonus_is_a_reward(run: Run) -> None:
    assert run(F.entropy_bonus)(row(2, 0), 0.5).tolist() == [[-1, 0]]


def test_effective_sample_size(run: Run) -> None:
    size = run(F.effective_sample_size)
    everything = torch.ones(1, 4, dtype=torch.bool)
    assert size(row(2, 2, 2, 2).log(), everything).item() == pytest.approx(1)
    assert size(row(1, 3, 1, 1).log(), everything).item() == pytest.approx(36 / (4 * 12))
    first_two = torch.tensor([[True, True, False, False]])
    assert size(row(1, 3, 9, 9).log(), first_two).item() == pytest.approx(0.8)
    assert size(row(1, 1, 1, 1), ~everything).item() == 0


# -- aggregation ------------------------------------------------------------------------------------------------------

GOLDEN: dict[str, float] = {
    "token_mean": (1 + 3 + 5) / 3,
    "prompt_mean": ((1 + 3) / 2 + 5) / 2,
    "sequence_mean": ((1 + 3) / 2 + 5) / 2,
    "fixed_length": (1 + 3 + 5) / (2 * 4),
}


def aggregate(value: Tensor, mask: Tensor, how: Any, **totals: Any) -> Tensor:
    return F.aggregate(value, mask, how, fixed_length=4 if how == "fixed_length" else None, **totals)


@pytest.mark.parametrize("how", GOLDEN)
def test_aggregate(how: str, run: Run) -> None:
    assert run(aggregate)(VALUE, MASK, how).item() == pytest.approx(GOLDEN[how])


def test_no_aggregation_keeps_the_tokens() -> None:
    assert F.aggregate(VALUE, MASK, "none").tolist() == [[1, 3, 0], [5, 0, 0]]


def test_a_sequence_without_tokens_counts_in_prompt_mean_only() -> None:
    value, mask = torch.cat([VALUE, VALUE[:1]]), torch.cat([MASK, MASK[:1] & False])
    assert F.aggregate(value, mask, "prompt_mean").item() == pytest.approx((2 + 5) / 3)
    assert F.aggregate(value, mask, "sequence_mean").item() == pytest.approx((2 + 5) / 2)


def test_a_fixed_length_of_one_is_the_mean_of_sums() -> None:
    assert F.aggregate(VALUE, MASK, "fixed_length", fixed_length=1).item() == pytest.approx((4 + 5) / 2)


def test_an_empty_mask_gives_zero() -> None:
    for how in GOLDEN:
        assert aggregate(VALUE, MASK & False, how).item() == 0


@settings(deadline=None)
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


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.log_ratio(x, x, x.bool()),
        lambda x: F.clipped_surrogate(x, x, 0.2, 0.2),
        lambda x: F.outside_clip_range(x, 0.2, 0.2),
        lambda x: F.kl_penalty(x, x, x.bool()),
        lambda x: F.trust_region(x, x, x.bool(), 1.0),
        lambda x: F.entropy_bonus(x, 0.1),
        lambda x: F.effective_sample_size(x, x.bool()),
        lambda x: F.sequence_count(x.bool(), "token_mean"),
        lambda x: F.aggregate(x, x.bool()),
    ],
)
def test_a_wrong_rank_is_refused(call: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"\w+ must have 2 dimensions, got 3: shape \[2, 3, 1\]. It is \[B, T\]"):
        call(torch.ones(2, 3, 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: F.log_ratio(x, y, x.bool()),
        lambda x, y: F.clipped_surrogate(x, y, 0.2, 0.2),
        lambda x, y: F.kl_penalty(x, y, x.bool()),
        lambda x, y: F.trust_region(x, y, x.bool(), 1.0),
        lambda x, y: F.effective_sample_size(x, y.bool()),
        lambda x, y: F.aggregate(x, y.bool()),
    ],
)
def test_unequal_shapes_are_refused(call: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"must have the same shape, got \w+ \[2, 3\], \w+ \[2, 1\]"):
        call(torch.ones(2, 3), torch.ones(2, 1))


def test_wrong_aggregations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"aggregation must be one of \['token_mean', .*\], got 'mean'"):
        F.aggregate(VALUE, MASK, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="aggregation='fixed_length' needs fixed_length"):
        F.aggregate(VALUE, MASK, "fixed_length")
