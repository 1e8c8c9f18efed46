"""Loads of replicas over time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from torchrl_moe.render.routes import load_figure


def test_steps_hold_until_the_end() -> None:
    loads = {"replica 0": [(0.0, 1), (2.0, 3)], "replica 1": [(0.0, 2)], "replica 2": []}
    (axes,) = load_figure(loads, [(3.0, "replica 1 died")], "a call").axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_array_equal(lines["replica 0"].get_xydata(), [[0, 1], [2, 3], [3, 3]])
    np.testing.assert_array_equal(lines["replica 1"].get_xydata(), [[0, 2], [3, 2]])
    assert len(lines["replica 2"].get_xdata()) == 0
    assert [text.get_text() for text in axes.texts] == ["replica 1 died"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("seconds", "requests in flight", "a call")


NEAR = [(3.0, "SIGKILL"), (3.15, "replica 1 DEAD"), (3.7, "replica 1 STARTING"), (5.9, "replica 1 SERVING")]


@pytest.mark.parametrize(
    ("events", "rows"),
    [
        (NEAR, 3),
        ([(0.0, "a"), (5.0, "b"), (10.0, "c")], 1),  # far apart: one line of text holds all
        ([(3.0, "replica 1 DEAD")] * 5, 5),
    ],
)
def test_labels_of_events_lie_above_the_lines_and_not_over_each_other(
    events: list[tuple[float, str]], rows: int
) -> None:
    figure = load_figure({"replica 0": [(0.0, 12), (9.0, 13)]}, events)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len({text.xy[1] for text in axes.texts}) == rows
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    highest = axes.transData.transform((0, 13))[1]
    assert all(box.y0 > highest for box in boxes)


def test_more_events_than_there_is_room_for_are_drawn_all_the_same() -> None:
    (axes,) = load_figure({"replica 0": [(0.0, 1)]}, [(1.0, "replica 1 DEAD")] * 100).axes
    assert len(axes.texts) == 100
    assert axes.get_ylim()[1] < 3


def test_seconds_that_go_back_are_refused() -> None:
    with pytest.raises(ValueError, match="the seconds of replica 0 go back"):
        load_figure({"replica 0": [(1.0, 0), (0.5, 0)]})
