"""Agreement of two sides' routes, by hand, and its figure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torchrl_moe.render.routes import agreement_figure, layer_agreement

NAN = np.nan
ENGINE = np.array([[[-1, -1], [0, 1]], [[-1, -1], [2, 3]], [[-1, -1], [0, 3]], [[-1, -1], [-1, -1]]], dtype=np.int8)
TRAINER = np.array([[[-1, -1], [1, 0]], [[-1, -1], [3, 1]], [[-1, -1], [-1, -1]], [[0, 1], [0, 1]]], dtype=np.int16)


def test_shares_by_hand() -> None:
    """Two rows are known to both, in layer 1: one has the same set, in another order."""
    np.testing.assert_array_equal(layer_agreement(ENGINE, TRAINER), [NAN, 0.5])
    np.testing.assert_array_equal(layer_agreement(ENGINE[None], ENGINE[None, ..., ::-1]), [NAN, 1.0])


def test_lines_hold_the_shares() -> None:
    figure = agreement_figure({"live": [NAN, 0.5, 0.9], "replayed": np.array([NAN, 1.0, 1.0])})
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.get_lines()] == ["live, mean 70.0%", "replayed, mean 100.0%"]
    np.testing.assert_array_equal(axes.get_lines()[0].get_xydata(), [[1, 0.5], [2, 0.9]])
    assert axes.get_title() == "agreement of trainer and engine"
    assert axes.get_xlabel() == "layer"


def test_layers_that_are_not_known_are_no_line() -> None:
    (line,) = agreement_figure({"none": [NAN, NAN]}).axes[0].get_lines()
    assert line.get_label() == "none" and len(line.get_xdata()) == 0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: layer_agreement(ENGINE, TRAINER[1:]), "must have the same shape"),
        (lambda: layer_agreement(ENGINE.astype(float), TRAINER), "recorded must have a signed integer dtype"),
        (lambda: agreement_figure({"live": [[0.5]]}), "live must have 1 dimension, got 2"),
        (lambda: agreement_figure({"live": [80.0]}), r"live: shares must be in 0\.\.1, got 80\.\.80"),
    ],
)
def test_bad_input_is_refused(call: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()
