"""The curves of a training run in one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_moe.render.legends import legend_above

__all__ = ["training_figure"]

PHASES = ("generate", "score", "train", "sync")


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one column, empty cells left out."""
    points = [(row["step"], float(row[name])) for row in rows if row.get(name, "") not in ("", None)]
    return [float(step) for step, _ in points], [value for _, value in points]


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
    reward.plot(*_series(rows, "reward"), label="rollouts")
    reward.plot(*_series(rows, "held_out_reward"), "o--", label="held-out problems, greedy")
    reward.set(ylim=(-0.02, 1.02))
    live = _series(rows, "dlogp_live")
    for label in ("mean", "max"):
        mismatch.plot(*_series(rows, f"dlogp_{label}"), label=f"{label}, replayed" if live[0] else label)
    if live[0]:
        mismatch.plot(*live, "--", label="mean, live router")
    if any(value > 0 for line in mismatch.get_lines() for value in line.get_ydata()):
        mismatch.set_yscale("log")
    length.plot(*_series(rows, "length"))
    columns = [[float(row.get(f"seconds_{phase}") or 0.0) for row in rows] for phase in PHASES]
    seconds.stackplot([float(row["step"]) for row in rows], *columns, labels=PHASES)
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
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    return figure
