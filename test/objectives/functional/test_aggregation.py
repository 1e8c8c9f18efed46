"""Golden numbers worked out by hand, and invariances; eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.sequences import NAN, Run
from torchrl_moe.objectives import functional as F

MASK = torch.tensor([[True, True, False], [True, False, False]])
VALUE = torch.tensor([[1.0, 3.0, 50.0], [5.0, 60.0, 70.0]])


def test_entropy_bonus_is_a_reward(run: Run) -> None:
    assert run(F.entropy_bonus)(torch.tensor([[2.0, 0.0]]), 0.5).tolist() == [[-1, 0]]


GOLDEN = {"token_mean": 9 / 3, "prompt_mean": (2 + 5) / 2, "sequence_mean": (2 + 5) / 2, "fixed_length": 9 / (2 * 4)}


def aggregate(value: Tensor, mask: Tensor, how: Any, **totals: Any) -> Tensor:
    return F.aggregate(value, mask, how, fixed_length=4 if how == "fixed_length" else None, **totals)


@pytest.mark.parametrize("how", GOLDEN)
def test_aggregate(how: str, run: Run) -> None:
    assert run(aggregate)(VALUE, MASK, how).item() == pytest.approx(GOLDEN[how])
    assert aggregate(VALUE, MASK & False, how).item() == 0


def test_no_aggregation_keeps_the_tokens() -> None:
    assert F.aggregate(VALUE, MASK, "none").tolist() == [[1, 3, 0], [5, 0, 0]]


def test_a_sequence_without_tokens_counts_in_prompt_mean_only() -> None:
    value, mask = torch.cat([VALUE, VALUE[:1]]), torch.cat([MASK, MASK[:1] & False])
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


def test_wrong_aggregations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"aggregation must be one of \['token_mean', .*\], got 'mean'"):
        F.aggregate(VALUE, MASK, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="aggregation='fixed_length' needs fixed_length"):
        F.aggregate(VALUE, MASK, "fixed_length")
