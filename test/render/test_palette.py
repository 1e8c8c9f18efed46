"""Text is legible on every color, on a light page and on a dark one, and colors are told apart without hue, too."""

from __future__ import annotations

from itertools import combinations

import pytest

from torchrl_moe.render.curves import HUES, OTHERS, Fill, shades

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
        solid = tuple(int(fill.on_white[at : at + 2], 16) for at in (1, 3, 5))
        assert contrast(solid, (0, 0, 0)) >= LEGIBLE


def deuteranope(rgb: tuple[float, ...]) -> tuple[float, ...]:
    """What somebody without green cones sees (Viénot, Brettel and Mollon 1999), roughly."""
    red, green, blue = rgb
    return (0.29275 * red + 0.70725 * green,) * 2 + (-0.02234 * red + 0.02234 * green + blue,)


@pytest.mark.parametrize("page", [LIGHT, DARK])
def test_two_colors_are_distinguished_without_green(page: tuple[int, int, int]) -> None:
    for one, other in combinations(HUES, 2):
        seen = [deuteranope(over(fill, page)) for fill in (one, other)]
        assert max(abs(a - b) for a, b in zip(*seen, strict=True)) > 12


def test_css_and_hex_by_hand() -> None:
    assert Fill(0, 100, 200, 0.5).css == "rgba(0,100,200,0.5)"
    assert Fill(0, 100, 200, 0.5).on_white == "#80b2e4"  # halfway to 255: 127.5, 177.5, 227.5, halves to even


def test_shades_get_stronger() -> None:
    assert [fill.alpha for fill in shades(3)] == [0.0, 0.25, 0.5]
    assert [fill.alpha for fill in shades(1)] == [0.0]
