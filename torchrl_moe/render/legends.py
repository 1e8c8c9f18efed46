"""Where legends go: above what they explain, so that nothing drawn lies under them."""

from __future__ import annotations

from typing import Any

__all__ = ["legend_above"]

POINTS_PER_INCH = 72


def legend_above(axes: Any, title: str = "") -> None:
    """Set a panel's title, and between it and the panel a legend, in as few lines as fit.

    Args:
        axes: of matplotlib, with labelled artists.
        title: of the panel.
    """
    labels = axes.get_legend_handles_labels()[1]
    pad = None
    # A legend wider than its panel's share would leave the panel itself no room.
    room = axes.figure.bbox.width / axes.get_gridspec().ncols
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
