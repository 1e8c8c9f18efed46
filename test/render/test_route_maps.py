"""What the maps of a rollout's experts hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.render.routes import routes_figure

NAN = np.nan
# three tokens, three layers (the first is dense), two experts for each token; the last has no route
ROUTES = np.array(
    [[[-1, -1], [0, 1], [2, 3]], [[-1, -1], [1, 0], [3, -1]], [[-1, -1], [-1, -1], [-1, -1]]], dtype=np.int8
)


def images(figure: Any) -> list[Any]:
    return [axes.get_images()[0].get_array().filled(NAN) for axes in figure.axes]


def test_maps_by_hand() -> None:
    figure = routes_figure(torch.from_numpy(ROUTES), prompt=1, title="a rollout")
    first, second = images(figure)
    np.testing.assert_array_equal(first, [[1, 1, NAN], [1, 1, NAN], [0, 0, NAN], [0, 0, NAN]])
    np.testing.assert_array_equal(second, [[0, 0, NAN], [0, 0, NAN], [1, 0, NAN], [1, 1, NAN]])
    assert [axes.get_ylabel() for axes in figure.axes] == ["layer 1\nexpert", "layer 2\nexpert"]
    assert [axes.get_lines()[0].get_xdata()[0] for axes in figure.axes] == [0.5, 0.5]
    assert figure.get_suptitle() == "a rollout"
    assert "response after the dashed line" in figure.axes[-1].get_xlabel()


def test_layers_are_chosen_or_spread() -> None:
    deep = np.zeros((2, 10, 1), np.int16)
    deep[:, 0] = -1
    drawn = [axes.get_ylabel().split()[1] for axes in routes_figure(deep).axes]
    assert drawn == ["1", "4", "6", "9"]  # of 1 to 9: places 0, 2.67, 5.33 and 8
    assert [axes.get_ylabel() for axes in routes_figure(deep, [7]).axes] == ["layer 7\nexpert"]


@pytest.mark.parametrize("routes", [ROUTES[:, :1], ROUTES[:0], ROUTES[2:]])
def test_without_routes_it_says_so(routes: Any) -> None:
    (panel,) = routes_figure(routes).axes
    assert panel.texts[0].get_text() == "no route is known"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((ROUTES[None],), "routes must have 3 dimensions, got 4"),
        ((ROUTES.astype(float),), "routes must have a signed integer dtype"),
        ((ROUTES, [3]), r"layers must be in 0\.\.2, got 3"),
    ],
)
def test_bad_input_is_refused(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        routes_figure(*arguments)
