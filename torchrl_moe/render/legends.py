"""Where legends go: above what they explain, so that nothing drawn lies under them."""

from __future__ import annotations

from typing import Any

__all__ = ["legend_above"]


def legend_above(axes: Any, title: str = "") -> None:
    """Set a panel's title, and between it and the panel a legend in one line.

    Args:
        axes: of matplotlib, with labelled artists.
        title: of the panel.
    """
    labels = axes.get_legend_handles_labels()[1]
    axes.set_title(title, pad=24.0 if labels else None)
    if labels:
        axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=len(labels),
            frameon=False,
            fontsize="small",
            columnspacing=1.2,
            handlelength=1.5,
        )
