"""Loads of replicas over time."""

from __future__ import annotations

import numpy as np
import pytest

from torchrl_moe.render.loads import load_figure


def test_steps_hold_until_the_end() -> None:
    loads = {"replica 0": [(0.0, 1), (2.0, 3)], "replica 1": [(0.0, 2)], "replica 2": []}
    (axes,) = load_figure(loads, [(3.0, "replica 1 died")], "a call").axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_array_equal(lines["replica 0"].get_xydata(), [[0, 1], [2, 3], [3, 3]])
    np.testing.assert_array_equal(lines["replica 1"].get_xydata(), [[0, 2], [3, 2]])
    assert len(lines["replica 2"].get_xdata()) == 0
    assert [text.get_text() for text in axes.texts] == ["replica 1 died"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("seconds", "requests in flight", "a call")


def test_seconds_that_go_back_are_refused() -> None:
    with pytest.raises(ValueError, match="the seconds of replica 0 go back"):
        load_figure({"replica 0": [(1.0, 0), (0.5, 0)]})
