"""Figures of a run, with the numbers of its rows, and colors that can be told apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
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
    held_out = "" if step % 2 else 0.5
    values = {"step": step, "reward": 0.1 * step, "held_out_reward": held_out, "dlogp_mean": 1e-6, "dlogp_max": 1e-5}
    seconds = {f"seconds_{phase}": 0.1 * (i + 1) for i, phase in enumerate(PHASES)}
    return {**values, "length": 3.0 + step, **seconds, **changes}


ROWS = [row(step) for step in range(4)]


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


@pytest.mark.parametrize("read", [float, str])
def test_four_panels_show_the_columns_as_measured_or_as_read_back_from_a_file(read: Any) -> None:
    rows = [{key: value if value == "" else read(value) for key, value in one.items()} for one in ROWS]
    figure = training_figure(rows, "a run")
    reward, mismatch, length, seconds = figure.axes
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["reward", "|log-prob, trainer - engine|", "answer length, tokens", "seconds per step"]
    assert figure.get_suptitle() == "a run" and {axes.get_xlabel() for axes in figure.axes} == {"step"}
    assert length.get_legend() is None  # its line has no label
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


def test_rewards_beyond_1_are_not_cut_off_and_the_live_router_is_shown_where_it_was_measured() -> None:
    reward, mismatch = training_figure([row(0, dlogp_live=0.25), row(1, reward=20.0, dlogp_live="")]).axes[:2]
    low, high = reward.get_ylim()
    assert low <= 0 and high >= 20
    shown = lines(mismatch)
    assert (shown["mean, live router"], shown["mean, replayed"]) == (([0], [0.25]), ([0, 1], [1e-6] * 2))
    assert set(shown) == {"mean, live router", "mean, replayed", "max, replayed"}


@pytest.mark.parametrize(
    "draw",
    [
        lambda: training_figure([row(0), row(1, seconds_sync="", seconds_score=None)]),
        lambda: training_figure([row(0, dlogp_mean=0.0, dlogp_max=0.0)]),
        lambda: training_figure([{"step": 0, "reward": 1.0}]),
        lambda: training_figure([]),
        lambda: log_ratio_figure({"R3": []}),
        lambda: log_ratio_figure({"R3": [0.0, 0.0]}),
    ],
    ids=["a phase did not run", "to the bit, on a log scale", "one column", "no row", "no ratio", "no difference"],
)
def test_little_data_or_none_is_drawn(draw: Callable[[], Any]) -> None:
    draw().draw_without_rendering()


# -- log-ratios, versions, phases -------------------------------------------------------------------------------------
def steps(figure: Any) -> list[StepPatch]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, StepPatch)]


def test_shares_by_hand() -> None:
    """Four bins from -2 to 2; the series share them, and each sums to 1. What is not finite is left out."""
    series = {"R3": [-0.5, 0.5, 0.5, math.nan, 0.6, math.inf], "none": torch.tensor([[-2.0], [2.0]])}
    figure = log_ratio_figure(series, bins=4, title="t", tau=3.0)
    for patch, shares in zip(steps(figure), ([0, 0.25, 0.75, 0], [0.5, 0, 0, 0.5]), strict=True):
        np.testing.assert_allclose(patch.get_data().edges, [-2, -1, 0, 1, 2])
        np.testing.assert_allclose(patch.get_data().values, shares)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["R3, 4 tokens", "none, 2 tokens"]
    assert (axes.get_title(), axes.get_yscale()) == ("t", "log")
    assert [line.get_xdata()[0] for line in axes.get_lines()] == [-math.log(3), math.log(3)]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: log_ratio_figure({}, tau=1.0), "tau must be a number above 1, got 1"),
        (lambda: log_ratio_figure({}, bins=0), "bins must be an integer of at least 1, got 0"),
        (lambda: staleness_figure([[0]], [0, 1]), "there are 1 batches, and 2 versions"),
        (lambda: staleness_figure([[0, 2]], [1]), "batch 0 was trained on version 1, and has tokens of version 2"),
    ],
)
def test_bad_input_is_refused(call: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


def test_versions_and_ages_by_hand() -> None:
    batches = [torch.tensor([[-1, 0, 0]]), torch.tensor([[-1, 0, 1], [-1, 1, 2]]), torch.tensor([-1])]
    above, below = staleness_figure(batches, [0, 3, 4], "a run").axes
    trained, mean = above.get_lines()
    np.testing.assert_array_equal(trained.get_ydata(), [0, 3, 4])
    np.testing.assert_array_equal(mean.get_xydata(), [[0, 0], [1, 1]])  # the third batch has no sampled token
    assert [bar.get_height() for bar in below.patches] == [0, 3]
    np.testing.assert_array_equal(below.get_lines()[0].get_ydata(), [0, 2])
    assert (above.get_title(), below.get_xlabel(), below.get_ylabel()) == ("a run", "batch", "staleness, versions")


def test_each_row_of_a_timeline_is_a_bar_on_its_replicas_line() -> None:
    rows = [(-1, "publish", 0.0, 0.5), (3, "pause", 0.5, 0.25), (0, "pause", 0.75, 0.25)]
    names = ("replica", "phase", "start", "seconds")
    (axes,) = timeline_figure([dict(zip(names, one, strict=True)) for one in rows], "a title").axes
    bars = [(patch.get_x(), patch.get_width(), round(patch.get_y() + 0.4)) for patch in axes.patches]
    assert bars == [(0.0, 0.5, 0), (0.5, 0.25, 2), (0.75, 0.25, 1)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["trainer", "replica 0", "replica 3"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["publish", "pause"]
    assert axes.get_title() == "a title"
    publish, one, other = (patch.get_facecolor() for patch in axes.patches)
    assert one == other != publish


# -- colors -----------------------------------------------------------------------------------------------------------
PAGES = {(255, 255, 255): (34, 34, 34), (17, 17, 17): (221, 221, 221)}
"""Light and dark, with their texts."""
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


@pytest.mark.parametrize("fill", [*HUES, OTHERS, *shades(7)])
def test_text_is_legible_on_it_and_black_on_the_solid_color_of_a_terminal(fill: Fill) -> None:
    for page, text in PAGES.items():
        assert contrast(over(fill, page), text) >= LEGIBLE
    assert contrast(tuple(int(fill.on_white[at : at + 2], 16) for at in (1, 3, 5)), (0, 0, 0)) >= LEGIBLE


def deuteranope(rgb: tuple[float, ...]) -> tuple[float, ...]:
    """What somebody without green cones sees (Viénot, Brettel and Mollon 1999), roughly."""
    red, green, blue = rgb
    return (0.29275 * red + 0.70725 * green,) * 2 + (-0.02234 * red + 0.02234 * green + blue,)


@pytest.mark.parametrize("page", PAGES)
def test_two_colors_are_distinguished_without_green(page: tuple[int, int, int]) -> None:
    for one, other in combinations(HUES, 2):
        seen = [deuteranope(over(fill, page)) for fill in (one, other)]
        assert max(abs(a - b) for a, b in zip(*seen, strict=True)) > 12
