"""Colors behind text: told apart by people who are color-blind, and legible on a light page and on a dark one.

They are Okabe and Ito's, mostly transparent: text keeps the page's own color.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HUES", "OTHERS", "Fill", "shades"]


@dataclass(frozen=True, slots=True)
class Fill:
    """A color behind text: red, green and blue of 0 to 255, and how opaque it is, 0 to 1."""

    red: int
    green: int
    blue: int
    alpha: float

    @property
    def css(self) -> str:
        """The value of a CSS ``background``."""
        return f"rgba({self.red},{self.green},{self.blue},{self.alpha:g})"

    @property
    def on_white(self) -> str:
        """The solid color that it is on white, as ``#rrggbb``: for a terminal, under black text."""
        parts = (round(255 + (part - 255) * self.alpha) for part in (self.red, self.green, self.blue))
        return "#" + "".join(f"{part:02x}" for part in parts)


HUES = (
    Fill(86, 180, 233, 0.45),  # sky blue
    Fill(230, 159, 0, 0.45),  # orange
    Fill(0, 158, 115, 0.45),  # bluish green
    Fill(204, 121, 167, 0.45),  # reddish purple
    Fill(240, 228, 66, 0.38),  # yellow
    Fill(0, 114, 178, 0.45),  # blue
    Fill(213, 94, 0, 0.45),  # vermilion
)
"""One for each thing that has a name; seven can be told apart, what is beyond them shares :data:`OTHERS`."""
OTHERS = Fill(128, 128, 128, 0.3)


def shades(count: int) -> list[Fill]:
    """Return so many steps of one hue, from none to strong: for what has an order.

    >>> [fill.alpha for fill in shades(3)]
    [0.0, 0.25, 0.5]
    """
    return [Fill(230, 159, 0, round(0.5 * step / max(1, count - 1), 3)) for step in range(count)]
