"""Phases of several actors as bars over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_moe.render.curves import legend_above

__all__ = ["timeline_figure"]


def timeline_figure(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Draw one line per replica, one color per phase.

    Args:
        rows: with ``replica`` (-1: the trainer), ``phase``, ``start`` and ``seconds``.
        title: of the figure.

    Returns:
        A matplotlib figure.
    """
    from torchrl_moe.render.figures import NotebookFigure

    replicas = sorted({row["replica"] for row in rows})
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    figure = NotebookFigure(figsize=(8, 1.2 + 0.35 * len(replicas)), layout="constrained")
    axes = figure.subplots()
    for number, phase in enumerate(phases):
        mine = [row for row in rows if row["phase"] == phase]
        axes.barh(
            [replicas.index(row["replica"]) for row in mine],
            [row["seconds"] for row in mine],
            left=[row["start"] for row in mine],
            color=f"C{number}",
            label=phase,
        )
    axes.set_yticks(range(len(replicas)), ["trainer" if index < 0 else f"replica {index}" for index in replicas])
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    legend_above(axes, title)
    return figure
