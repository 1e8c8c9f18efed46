"""How many requests each replica had, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_moe.render.legends import legend_above

__all__ = ["load_figure"]

ROW = 0.07
"""Of the height of the axes, for a row of labels."""
MOST_ROWS = 8
GAP = 6.0
"""Pixels between two labels of a row."""


def load_figure(
    loads: Mapping[str, Sequence[tuple[float, float]]],
    events: Sequence[tuple[float, str]] = (),
    title: str = "",
    quantity: str = "requests in flight",
) -> Any:
    """Draw the load of each replica as a line of steps, and a line across them for each event.

    Args:
        loads: by replica, seconds and load from there to the next entry.
        events: seconds, and what happened (``"replica 1 died"``, say).
        title: of the figure.
        quantity: what the load is, with its unit.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        ValueError: seconds that go back.
    """
    from torchrl_moe.render.figures import NotebookFigure

    for name, samples in loads.items():
        times = [at for at, _ in samples]
        if times != sorted(times):
            raise ValueError(f"the seconds of {name} go back")
    end = max([0.0, *(samples[-1][0] for samples in loads.values() if samples), *(at for at, _ in events)])
    figure = NotebookFigure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, samples) in enumerate(loads.items()):
        times = [at for at, _ in samples] + ([end] if samples else [])
        counts = [count for _, count in samples] + ([samples[-1][1]] if samples else [])
        axes.step(times, counts, where="post", linestyle=("-", "--", "-.", ":")[number % 4], label=name)
    axes.set(xlabel="seconds", ylabel=quantity)
    rows = _draw_events(axes, events)
    highest = max([1.0, *(count for samples in loads.values() for _, count in samples)])
    axes.set_ylim(0, 1.05 * highest / (1 - ROW * rows))
    axes.grid(alpha=0.3)
    legend_above(axes, title or "load of the replicas")
    return figure


def _draw_events(axes: Any, events: Sequence[tuple[float, str]]) -> int:
    """Draw a line and a label for each event, labels in rows from the top, none over another; return how many rows."""
    for at, _ in events:
        axes.axvline(at, color="grey", linestyle=":")
    ends: list[float] = []  # of the last label of each row
    behind = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 0.5}  # or lines would strike it through
    for at, what in sorted(events):
        label = axes.annotate(
            what, (at, 1), xycoords=axes.get_xaxis_transform(), xytext=(3, -3), textcoords="offset points", va="top",
            fontsize="small", bbox=behind,
        )  # fmt: skip
        begin = axes.transData.transform((at, 0))[0]
        row = next((row for row, end in enumerate(ends) if end <= begin), len(ends))
        if row == MOST_ROWS:
            row = ends.index(min(ends))
        label.xy = (at, 1 - ROW * row)
        ends[row : row + 1] = [begin + label.get_window_extent().width + GAP]
    return len(ends)
