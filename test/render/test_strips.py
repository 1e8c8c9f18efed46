"""Strips of blocks, by hand."""

from __future__ import annotations

import numpy as np

from torchrl_moe.render.strips import CELLS, heat_strip, strips_html


def test_heights_by_hand() -> None:
    assert heat_strip(range(8)) == "▁▂▃▄▅▆▇█"
    assert heat_strip([0, 1, 2], top=4) == "▁▃▅"  # 0, 1.75 and 3.5 of 7 steps; halves go up
    assert heat_strip([5, 9], top=4) == "██"
    assert heat_strip([]) == "" and heat_strip([0, 0]) == "▁▁"
    assert heat_strip([np.nan, 1]) == "·█" and heat_strip([np.nan]) == "·"


def test_many_numbers_are_means() -> None:
    strip = heat_strip([*[1] * 128, *[0] * 128])
    assert strip == "█" * (CELLS // 2) + "▁" * (CELLS // 2)
    assert heat_strip([np.nan] * 128) == "·" * CELLS


def test_lines_are_escaped() -> None:
    html = strips_html("<b>", ["<script>", "a & b"], "<i>")
    assert "&lt;script&gt;\na &amp; b" in html and "&lt;b&gt;" in html and "&lt;i&gt;" in html
    assert html.count("<") == html.count(">") == 8
