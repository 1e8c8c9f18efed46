"""Figures of a run, with the numbers of its rows, and colors that can be told apart."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.patches import StepPatch

from torchrl_moe.render.curves import (
    HUES,
    OTHERS,
    PHASES,
    Fill,
    log_ratio_figure,
    shades,
    staleness_figure,
    timeline_figure,
    training_figure,
)


# -- curves -----------------------------------------------------------------------------------------------------------
def row(step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "step": step,
        "reward": 0.1 * step,
        "held_out_reward": "" if step % 2 else 0.5,
        "dlogp_mean": 1e-6,
        "dlogp_max": 1e-5,
        "length": 3.0 + step,
        **{f"seconds_{phase}": 0.1 * (i + 1) for i, phase in enumerate(PHASES)},
    }
    return {**values, **changes}


ROWS = [row(step) for step in range(4)]


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_four_panels_show_the_columns() -> None:
    figure = training_figure(ROWS, "a run")
    reward, mismatch, length, seconds = figure.axes
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["reward", "|log-prob, trainer - engine|", "answer length, tokens", "seconds per step"]
    assert figure.get_suptitle() == "a run" and {axes.get_xlabel() for axes in figure.axes} == {"step"}
    shown = lines(reward)
    assert shown["rollouts"] == ([0, 1, 2, 3], pytest.approx([0.0, 0.1, 0.2, 0.3]))
    assert shown["held-out problems, greedy"] == ([0, 2], [0.5, 0.5])
    assert lines(mismatch) == {"mean": ([0, 1, 2, 3], [1e-6] * 4), "max": ([0, 1, 2, 3], [1e-5] * 4)}
    assert mismatch.get_yscale() == "log" and [values for _, values in lines(length).values()] == [[3, 4, 5, 6]]
    assert [area.get_label() for area in seconds.collections] == list(PHASES)
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in seconds.collections]
    assert np.allclose(tops, [0.1, 0.3, 0.6, 1.0])  # stacked


@pytest.mark.parametrize("empty", ["", None])
def test_a_short_run_can_be_seen_and_empty_cells_are_left_out(empty: Any) -> None:
    rows = [row(step, held_out_reward=empty, dlogp_mean=empty if step else 1e-6, dlogp_max=empty) for step in range(3)]
    reward, mismatch, length, _ = training_figure(rows).axes
    assert set(lines(reward)) == {"rollouts"} and lines(mismatch) == {"mean": ([0], [1e-6])}
    assert [line.get_marker() for axes in (reward, mismatch, length) for line in axes.get_lines()] == ["o"] * 3
    assert all(float(tick).is_integer() for axes in (reward, mismatch, length) for tick in axes.get_xticks())
    assert mismatch.get_xlim() == (-0.5, 2.5)
    assert training_figure([row(step) for step in range(10)]).axes[0].get_lines()[0].get_marker() == "None"


def test_what_was_not_measured_says_so_and_one_step_has_bars() -> None:
    _, mismatch, _, seconds = training_figure([row(0, dlogp_mean="", dlogp_max="", seconds_sync=0.0)]).axes
    assert [text.get_text() for text in mismatch.texts] == ["not measured"] and not mismatch.get_lines()
    assert [bar.get_height() for bar in seconds.patches] == pytest.approx([0.1, 0.2, 0.3])
    assert [text.get_text() for text in seconds.get_legend().get_texts()] == ["generate", "score", "train"]


def test_rewards_beyond_1_are_not_cut_off() -> None:
    low, high = training_figure([row(step, reward=10.0 * step) for step in range(3)]).axes[0].get_ylim()
    assert low <= 0 and high >= 20


def test_the_live_router_is_shown_where_it_was_measured() -> None:
    mismatch = training_figure([row(0, dlogp_live=0.25), row(1, dlogp_live="")]).axes[1]
    assert lines(mismatch)["mean, live router"] == ([0], [0.25])
    assert lines(mismatch)["mean, replayed"] == ([0, 1], [1e-6] * 2)
    assert set(lines(mismatch)) == {"mean, live router", "mean, replayed", "max, replayed"}


def test_rows_read_back_from_a_file_are_text(tmp_path: Path) -> None:
    figure = training_figure([{key: str(value) for key, value in one.items()} for one in ROWS])
    assert lines(figure.axes[0])["rollouts"][0] == [0, 1, 2, 3]
    figure.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "rows",
    [
        [row(0)],
        [row(0), row(1, seconds_sync="", seconds_score=None)],  # a phase that did not run took no time
        [row(0, dlogp_mean=0.0, dlogp_max=0.0)],  # agreement to the bit, on a log scale
        [{"step": 0, "reward": 1.0}],
        [],
    ],
)
def test_short_and_incomplete_runs_are_drawn(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    training_figure(rows).savefig(tmp_path / "run.png")


# -- histograms -------------------------------------------------------------------------------------------------------
def steps(figure: object) -> list[StepPatch]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, StepPatch)]  # type: ignore[attr-defined]


def test_shares_by_hand() -> None:
    """Four bins from -2 to 2; the series share them, and each sums to 1. What is not finite is left out."""
    series = {"R3": [-0.5, 0.5, 0.5, math.nan, 0.6, math.inf], "none": torch.tensor([[-2.0], [2.0]])}
    figure = log_ratio_figure(series, bins=4, title="t", tau=3.0)
    first, second = steps(figure)
    for patch in (first, second):
        np.testing.assert_allclose(patch.get_data().edges, [-2, -1, 0, 1, 2])
    np.testing.assert_allclose(first.get_data().values, [0, 0.25, 0.75, 0])
    np.testing.assert_allclose(second.get_data().values, [0.5, 0, 0, 0.5])
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["R3, 4 tokens", "none, 2 tokens"]
    assert (axes.get_title(), axes.get_yscale()) == ("t", "log")
    assert [line.get_xdata()[0] for line in axes.get_lines()] == [-math.log(3), math.log(3)]


@pytest.mark.parametrize("values", [[], [0.0, 0.0]])
def test_nothing_and_no_difference_are_drawn(values: list[float], tmp_path: Path) -> None:
    figure = log_ratio_figure({"R3": values})
    assert sum(steps(figure)[0].get_data().values) == (1 if values else 0)
    figure.savefig(tmp_path / "f.png")


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="tau must be a number above 1, got 1"):
        log_ratio_figure({}, tau=1.0)
    with pytest.raises(ValueError, match="bins must be an integer of at least 1, got 0"):
        log_ratio_figure({}, bins=0)


# -- staleness --------------------------------------------------------------------------------------------------------
def test_versions_and_ages_by_hand() -> None:
    batches = [torch.tensor([[-1, 0, 0]]), torch.tensor([[-1, 0, 1], [-1, 1, 2]]), torch.tensor([-1])]
    above, below = staleness_figure(batches, [0, 3, 4], "a run").axes
    trained, mean = above.get_lines()
    np.testing.assert_array_equal(trained.get_ydata(), [0, 3, 4])
    np.testing.assert_array_equal(mean.get_xydata(), [[0, 0], [1, 1]])  # the third batch has no sampled token
    assert [bar.get_height() for bar in below.patches] == [0, 3]
    np.testing.assert_array_equal(below.get_lines()[0].get_ydata(), [0, 2])
    assert above.get_title() == "a run"
    assert (below.get_xlabel(), below.get_ylabel()) == ("batch", "staleness, versions")


def test_versions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 1 batches, and 2 versions"):
        staleness_figure([[0]], [0, 1])
    with pytest.raises(ValueError, match="batch 0 was trained on version 1, and has tokens of version 2"):
        staleness_figure([[0, 2]], [1])


# -- timelines --------------------------------------------------------------------------------------------------------
BARS = [
    {"replica": -1, "phase": "publish", "start": 0.0, "seconds": 0.5},
    {"replica": 3, "phase": "pause", "start": 0.5, "seconds": 0.25},
    {"replica": 0, "phase": "pause", "start": 0.75, "seconds": 0.25},
]


def test_each_row_is_a_bar_on_its_replicas_line() -> None:
    (axes,) = timeline_figure(BARS, "a title").axes
    bars = [(patch.get_x(), patch.get_width(), round(patch.get_y() + 0.4)) for patch in axes.patches]
    assert bars == [(0.0, 0.5, 0), (0.5, 0.25, 2), (0.75, 0.25, 1)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["trainer", "replica 0", "replica 3"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["publish", "pause"]
    assert axes.get_title() == "a title"
    publish, one, other = (patch.get_facecolor() for patch in axes.patches)
    assert one == other != publish


# -- palette ----------------------------------------------------------------------------------------------------------
LIGHT, DARK = (255, 255, 255), (17, 17, 17)  # pages, with their texts:
TEXT = {LIGHT: (34, 34, 34), DARK: (221, 221, 221)}
LEGIBLE = 4.5
"""The contrast that WCAG 2 asks of text."""


def over(fill: Fill, page: tuple[int, int, int]) -> tuple[float, ...]:
    rgb = (fill.red, fill.green, fill.blue)
    return tuple(fill.alpha * a + (1 - fill.alpha) * b for a, b in zip(rgb, page, strict=True))


def luminance(rgb: tuple[float, ...]) -> float:
    linear = [c / 3294.6 if c <= 10.31475 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", [LIGHT, DARK])
@pytest.mark.parametrize("fill", [*HUES, OTHERS, *shades(7)])
def test_text_is_legible_on_it(fill: Fill, page: tuple[int, int, int]) -> None:
    assert contrast(over(fill, page), TEXT[page]) >= LEGIBLE


def test_black_is_legible_on_the_solid_colors_of_a_terminal() -> None:
    for fill in (*HUES, OTHERS, *shades(7)):
        assert contrast(tuple(int(fill.on_white[at : at + 2], 16) for at in (1, 3, 5)), (0, 0, 0)) >= LEGIBLE


def deuteranope(rgb: tuple[float, ...]) -> tuple[float, ...]:
    """What somebody without green cones sees (Viénot, Brettel and Mollon 1999), roughly."""
    red, green, blue = rgb
    return (0.29275 * red + 0.70725 * green,) * 2 + (-0.02234 * red + 0.02234 * green + blue,)


@pytest.mark.parametrize("page", [LIGHT, DARK])
def test_two_colors_are_distinguished_without_green(page: tuple[int, int, int]) -> None:
    for one, other in combinations(HUES, 2):
        seen = [deuteranope(over(fill, page)) for fill in (one, other)]
        assert max(abs(a - b) for a, b in zip(*seen, strict=True)) > 12
