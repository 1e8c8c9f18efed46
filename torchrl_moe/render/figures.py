"""What every figure here is made with: matplotlib's figure without pyplot, legends that cover nothing, whole ticks.

It alone imports matplotlib, so what draws imports this file when it draws.
"""

from __future__ import annotations

import io
from typing import Literal

try:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'torchrl_moe[render]'") from error

POINTS_PER_INCH = 72


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


def whole_ticks(axis: Axis, most: int | Literal["auto"] = "auto") -> None:
    """Number an axis at whole numbers only."""
    axis.set_major_locator(MaxNLocator(nbins=most, integer=True))


def legend_above(axes: Axes, title: str = "") -> None:
    """Set a panel's title, and between it and the panel a legend, in as few lines as fit."""
    labels = axes.get_legend_handles_labels()[1]
    pad = None
    # a legend wider than its panel's share would leave the panel itself no room
    grid = axes.get_gridspec()
    room = axes.figure.bbox.width / (1 if grid is None else grid.ncols)
    # first all in one line, then in fewer and fewer columns
    for columns in range(len(labels), 0, -1):
        legend = axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=columns,
            frameon=False,
            fontsize="small",
            columnspacing=1.2,
            handlelength=1.5,
        )
        box = legend.get_window_extent()
        pad = max(24.0, 8.0 + box.height * POINTS_PER_INCH / axes.figure.dpi)
        if box.width <= room:
            break
    axes.set_title(title, pad=pad)
