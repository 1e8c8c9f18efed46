"""The load of experts as strips, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torchrl_moe.render.route_strips import ROWS, routes_html

ROUTES = np.array([[[-1, -1], [0, 3]], [[-1, -1], [0, 1]]], dtype=np.int8)


def test_a_strip_for_each_layer_with_routes() -> None:
    html = routes_html("routes", [ROUTES, torch.from_numpy(ROUTES)])
    assert "layer 1  █▅▁▅  busiest: expert 0, 2 × even" in html  # 4, 2, 0, 2 of 8
    assert "layer 0" not in html
    assert "load of experts 0 to 3, left to right, of 4 rows" in html


def test_samples_of_other_widths_are_counted_alike() -> None:
    few, more = ROUTES[:1], np.full((1, 2, 2), 5, np.int8)
    for samples in ([few, more], [more, few]):
        assert "layer 1  ▅▁▁▅▁█" in routes_html("", samples)  # 1, 0, 0, 1, 0, 2


def test_without_routes_it_says_so() -> None:
    for samples in ([], [ROUTES[:0]], [ROUTES[:, :1]]):
        assert "no route is known" in routes_html("", samples)


def test_deep_models_and_long_rollouts_are_bounded() -> None:
    deep = np.zeros((10, 96, 8), np.int16) + np.arange(96)[:, None] * 40
    html = routes_html("", [deep])
    assert "and 80 more layers with routes" in html and len(html) < 10_000

    def samples() -> Iterator[Any]:
        while True:
            yield np.zeros((ROWS // 2 + 1, 1, 1), np.int8)

    assert f"of {ROWS:,} rows" in routes_html("", samples())
