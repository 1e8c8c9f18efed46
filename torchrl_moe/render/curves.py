"""The curves of a training run in one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_moe.render.legends import legend_above

__all__ = ["training_figure"]

PHASES = ("generate", "score", "train", "sync")
FEW = 10
"""Points below which they are marked."""


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one column, empty cells left out."""
    points = [(row["step"], float(row[name])) for row in rows if row.get(name, "") not in ("", None)]
    return [float(step) for step, _ in points], [value for _, value in points]


def _plot(axes: Any, points: tuple[list[float], list[float]], label: str = "", form: str = "-") -> None:
    """Draw a series that has points; few are marked, since a line of one cannot be seen."""
    if points[0]:
        axes.plot(*points, form if form.startswith("o") or len(points[0]) >= FEW else f"o{form}", label=label or None)


def training_figure(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Draw reward, mismatch, length and seconds per phase.

    Args:
        rows: one per step, with the columns of ``metrics.csv``: ``step``, ``reward``, ``held_out_reward``,
            ``dlogp_mean``, ``dlogp_max``, ``length`` and ``seconds_*``; ``dlogp_live``, the mean under the live router,
            is drawn if some row has it.
        title: of the figure.

    Returns:
        A matplotlib figure.
    """
    from torchrl_moe.render.figures import NotebookFigure, whole_ticks

    figure = NotebookFigure(figsize=(10, 6.5), layout="constrained")
    (reward, mismatch), (length, seconds) = figure.subplots(2, 2)
    _plot(reward, _series(rows, "reward"), "rollouts")
    _plot(reward, _series(rows, "held_out_reward"), "held-out problems, greedy", "o--")
    if all(0 <= value <= 1 for line in reward.get_lines() for value in line.get_ydata()):
        reward.set(ylim=(-0.02, 1.02))
    live = _series(rows, "dlogp_live")
    for label in ("mean", "max"):
        _plot(mismatch, _series(rows, f"dlogp_{label}"), f"{label}, replayed" if live[0] else label)
    _plot(mismatch, live, "mean, live router", "--")
    if any(value > 0 for line in mismatch.get_lines() for value in line.get_ydata()):
        mismatch.set_yscale("log")
    _plot(length, _series(rows, "length"))
    steps = [float(row["step"]) for row in rows]
    shown = [phase for phase in PHASES if any(row.get(f"seconds_{phase}") for row in rows)]
    columns = [[float(row.get(f"seconds_{phase}") or 0.0) for row in rows] for phase in shown]
    if len(rows) > 1:
        seconds.stackplot(steps, *columns, labels=shown)
    for phase, column in zip(shown, columns, strict=True) if len(rows) == 1 else ():  # an area of one step has no width
        seconds.bar(steps, column, 0.5, bottom=sum(bar.get_height() for bar in seconds.patches), label=phase)
    panels = {
        "reward": reward,
        "|log-prob, trainer - engine|": mismatch,
        "answer length, tokens": length,
        "seconds per step": seconds,
    }
    for name, axes in panels.items():
        legend_above(axes, name)
        axes.set_xlabel("step")
        whole_ticks(axes.xaxis)
        if not axes.has_data():
            axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
            axes.set_yticks([])
        if steps:
            axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    return figure
