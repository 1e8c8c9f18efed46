"""A trainer and the replicas that work for it, side by side over time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchrl_moe.render.legends import legend_above

__all__ = ["collection_figure"]


def collection_figure(
    taker: str,
    phases: Sequence[Mapping[str, Any]],
    flights: Mapping[str, Sequence[tuple[float, int]]],
    updates: Sequence[float] = (),
    *,
    sums: Collection[str] = (),
    end: float = 0.0,
    title: str = "",
) -> Any:
    """Draw a bar of phases, below it a panel for each replica, and a line through all of them for each update.

    Args:
        taker: the name of the bar.
        phases: with ``phase``, ``start`` and ``seconds``.
        flights: by replica, seconds and answers in flight from there to the next entry.
        updates: seconds of weight updates.
        sums: those of ``flights`` that are many replicas together: each has its own scale, all others share one.
        end: seconds up to which the last entries hold.
        title: of the figure.

    Returns:
        A matplotlib figure.
    """
    from torchrl_moe.render.figures import NotebookFigure, whole_ticks

    heights = [0.5, *[0.8] * len(flights)]
    figure = NotebookFigure(figsize=(9, 1.2 + 0.9 * sum(heights)), layout="constrained")
    bar, *panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for number, name in enumerate(sorted({row["phase"] for row in phases})):
        spans = [(row["start"], row["seconds"]) for row in phases if row["phase"] == name]
        bar.broken_barh(spans, (0, 1), color=f"C{number}", linewidth=0, label=name)
    if panels:
        bar.plot([], [], color="C2", linewidth=6, alpha=0.5, label="answers in flight")
    bar.set(ylim=(0, 1), yticks=[])
    for panel, samples in zip(panels, flights.values(), strict=True):
        times = [at for at, _ in samples] + [max(end, samples[-1][0])]
        counts = [count for _, count in samples] + [samples[-1][1]]
        panel.fill_between(times, counts, step="post", color="C2", alpha=0.5, linewidth=0)
        panel.step(times, counts, where="post", color="C2", linewidth=1)
        whole_ticks(panel.yaxis, 2)
        panel.grid(alpha=0.3)
    highest = {name: max(count for _, count in samples) for name, samples in flights.items()}
    shared = max((most for name, most in highest.items() if name not in sums), default=0)
    for axes, name in zip((bar, *panels), (taker, *flights), strict=True):
        axes.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8)
        if updates:
            line = {"color": "grey", "linestyle": ":", "label": "weight update"}
            axes.vlines(updates, 0, 1, transform=axes.get_xaxis_transform(), **line)
        if axes is not bar:
            axes.set_ylim(0, 1.1 * (highest[name] if name in sums else shared) or 1)
        axes.margins(x=0)
    (panels[-1] if panels else bar).set_xlabel("seconds")
    figure.align_ylabels()
    legend_above(bar, title)
    return figure
