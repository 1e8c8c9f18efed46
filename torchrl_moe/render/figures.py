"""The figure that everything here draws on: matplotlib's, without pyplot, and shown by a notebook as it is."""

from __future__ import annotations

import io
from typing import Any, Literal

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'torchrl_moe[render]'") from error

__all__ = ["NotebookFigure", "whole_ticks"]


class NotebookFigure(Figure):
    """A matplotlib figure that no pyplot keeps: it goes with its last reference, and needs no ``%matplotlib inline``.

    Colors are those of the style in use (``matplotlib.style.use("dark_background")``), its background included, so a
    figure can be read on a light page and on a dark one.
    """

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows where pyplot was never imported."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def whole_ticks(axis: Any, most: int | Literal["auto"] = "auto") -> None:
    """Number an axis at whole numbers only."""
    axis.set_major_locator(MaxNLocator(nbins=most, integer=True))
