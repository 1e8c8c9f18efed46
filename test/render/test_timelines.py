"""Bars over time: where each begins, how long it is, and whose it is."""

from __future__ import annotations

from torchrl_moe.render.curves import timeline_figure

ROWS = [
    {"replica": -1, "phase": "publish", "start": 0.0, "seconds": 0.5},
    {"replica": 3, "phase": "pause", "start": 0.5, "seconds": 0.25},
    {"replica": 0, "phase": "pause", "start": 0.75, "seconds": 0.25},
]


def test_each_row_is_a_bar_on_its_replicas_line() -> None:
    (axes,) = timeline_figure(ROWS, "a title").axes
    bars = [(patch.get_x(), patch.get_width(), round(patch.get_y() + 0.4)) for patch in axes.patches]
    assert bars == [(0.0, 0.5, 0), (0.5, 0.25, 2), (0.75, 0.25, 1)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["trainer", "replica 0", "replica 3"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["publish", "pause"]
    assert axes.get_title() == "a title"


def test_phases_have_colors_of_their_own() -> None:
    (axes,) = timeline_figure(ROWS).axes
    publish, one, other = (patch.get_facecolor() for patch in axes.patches)
    assert one == other != publish
