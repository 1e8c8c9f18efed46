"""The shares that are drawn, their bins and the lines of F(tau)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.patches import StepPatch

from torchrl_moe.render.curves import log_ratio_figure


def steps(figure: object) -> list[StepPatch]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, StepPatch)]  # type: ignore[attr-defined]


def test_shares_by_hand() -> None:
    """Four bins from -2 to 2; the series share them, and each sums to 1."""
    figure = log_ratio_figure({"R3": [-0.5, 0.5, 0.5, 0.6], "none": torch.tensor([[-2.0], [2.0]])}, bins=4, title="t")
    first, second = steps(figure)
    for patch in (first, second):
        np.testing.assert_allclose(patch.get_data().edges, [-2, -1, 0, 1, 2])
    np.testing.assert_allclose(first.get_data().values, [0, 0.25, 0.75, 0])
    np.testing.assert_allclose(second.get_data().values, [0.5, 0, 0, 0.5])
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["R3, 4 tokens", "none, 2 tokens"]
    assert (axes.get_title(), axes.get_yscale()) == ("t", "log")


def test_lines_stand_at_log_tau() -> None:
    figure = log_ratio_figure({"R3": [0.1]}, tau=3.0)
    assert [line.get_xdata()[0] for line in figure.axes[0].get_lines()] == [-math.log(3), math.log(3)]


def test_what_is_not_finite_is_left_out() -> None:
    figure = log_ratio_figure({"R3": [1.0, math.nan, math.inf]}, bins=2)
    (patch,) = steps(figure)
    assert patch.get_data().values.tolist() == [0, 1]
    assert patch.get_label() == "R3, 1 tokens"


@pytest.mark.parametrize("values", [[], [0.0, 0.0]])
def test_nothing_and_no_difference_are_drawn(values: list[float], tmp_path: Path) -> None:
    figure = log_ratio_figure({"R3": values})
    assert sum(steps(figure)[0].get_data().values) == (1 if values else 0)
    figure.savefig(tmp_path / "f.png")


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="tau must be a finite number above 1, got 1"):
        log_ratio_figure({}, tau=1.0)
    with pytest.raises(ValueError, match="bins must be an integer of at least 1, got 0"):
        log_ratio_figure({}, bins=0)
