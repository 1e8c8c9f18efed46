"""Each argument is refused with what was got and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_moe.objectives.arguments import check_choice, check_coefficients, check_fixed_length, clip_range


def test_choice() -> None:
    check_choice("reduction", None, (None, "mean"))
    with pytest.raises(ValueError, match=r"^reduction must be one of \[None, 'mean'\], got 'sum'.$"):
        check_choice("reduction", "sum", (None, "mean"))


def test_coefficients() -> None:
    check_coefficients(None, None, None)
    check_coefficients(0.1, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"^kl_mask_threshold must be positive, got 0: None switches it off.$"):
        check_coefficients(0, None, None)
    with pytest.raises(ValueError, match=r"^kl_to_ref_coeff must not be negative, got -1: None switches it off.$"):
        check_coefficients(None, -1, None)
    with pytest.raises(ValueError, match=r"^kl_to_inference_coeff must not be negative, got nan"):
        check_coefficients(None, None, float("nan"))


def test_fixed_length() -> None:
    check_fixed_length("fixed_length", 128)
    check_fixed_length("token_mean", None)
    for aggregation, length in (("fixed_length", None), ("token_mean", 128)):
        with pytest.raises(ValueError, match=f"go together, got fixed_length={length} and aggregation='{aggregation}'"):
            check_fixed_length(aggregation, length)
    with pytest.raises(ValueError, match=r"^fixed_length must be at least 1, got 0.$"):
        check_fixed_length("fixed_length", 0)


def test_clip_range() -> None:
    assert clip_range(0.2) == (0.2, 0.2)
    assert clip_range((0.2, 1.5)) == (0.2, 1.5)
    assert clip_range([0, 0]) == (0.0, 0.0)  # type: ignore[arg-type] # as Hydra gives it


@pytest.mark.parametrize("wrong", [1.0, -0.1, (1.0, 0.2), (0.2, -0.1), (0.2,), (0.1, 0.2, 0.3), float("nan")])
def test_a_wrong_clip_range_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^clip_epsilon must be a number in \[0, 1\), or \(low, high\)"):
        clip_range(wrong)
