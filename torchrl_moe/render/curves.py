"""Figures of a training run: its curves, log-ratios, staleness, timelines; and the colors that mark things.

Functions named ``*_figure`` return a matplotlib figure; without matplotlib they raise an ImportError that names the
extra.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchrl_moe._checks import check_number

__all__ = [
    "HUES",
    "OTHERS",
    "Fill",
    "log_ratio_figure",
    "shades",
    "staleness_figure",
    "timeline_figure",
    "training_figure",
]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors behind text: told apart by people who are color-blind, and legible on a light page and on a dark one.
# They are Okabe and Ito's, mostly transparent: text keeps the page's own color.


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


PHASES = ("generate", "score", "train", "sync")
Cell: TypeAlias = "str | float | None"
"""Of a table, as measured or as read back from a file; an empty one was not measured."""
FEW = 10
"""Points below which they are marked."""


def _series(rows: Sequence[Mapping[str, Cell]], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one column, empty cells left out."""
    points = [(float(row["step"] or 0), float(row[name] or 0)) for row in rows if row.get(name, "") not in ("", None)]
    return [step for step, _ in points], [value for _, value in points]


def _plot(axes: Axes, points: tuple[list[float], list[float]], label: str = "", form: str = "-") -> None:
    """Draw a series that has points; few are marked, since a line of one cannot be seen."""
    if points[0]:
        axes.plot(*points, form if form.startswith("o") or len(points[0]) >= FEW else f"o{form}", label=label or None)


def training_figure(rows: Sequence[Mapping[str, Cell]], title: str = "") -> Figure:
    """Draw reward, mismatch, length and seconds per phase.

    Args:
        rows: one per step, with the columns of ``metrics.csv``: ``step``, ``reward``, ``held_out_reward``,
            ``dlogp_mean``, ``dlogp_max``, ``length`` and ``seconds_*``; ``dlogp_live``, the mean under the live router,
            is drawn if some row has it.
        title: of the figure.
    """
    from torchrl_moe.render.figures import NotebookFigure, legend_above, whole_ticks

    figure = NotebookFigure(figsize=(10, 6.5), layout="constrained")
    (reward, mismatch), (length, seconds) = figure.subplots(2, 2)
    _plot(reward, _series(rows, "reward"), "rollouts")
    _plot(reward, _series(rows, "held_out_reward"), "held-out problems, greedy", "o--")
    # a reward that is a share has the same axis in each run
    if all(0 <= value <= 1 for line in reward.get_lines() for value in line.get_ydata()):
        reward.set(ylim=(-0.02, 1.02))
    live = _series(rows, "dlogp_live")
    for label in ("mean", "max"):
        _plot(mismatch, _series(rows, f"dlogp_{label}"), f"{label}, replayed" if live[0] else label)
    _plot(mismatch, live, "mean, live router", "--")
    # agreement to the bit has no place on a log scale
    if any(value > 0 for line in mismatch.get_lines() for value in line.get_ydata()):
        mismatch.set_yscale("log")
    _plot(length, _series(rows, "length"))
    steps = [float(row["step"] or 0) for row in rows]
    # a phase that never ran is not in the legend
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
        if steps:  # half a step more, or bars at both ends are cut
            axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    return figure


def log_ratio_figure(
    log_ratios: Mapping[str, npt.ArrayLike], tau: float = 2.0, bins: int = 81, title: str = ""
) -> Figure:
    """Draw what share of the tokens has which ``log π - log μ``, on a log scale: the tails are what matters.

    Args:
        log_ratios: by label (with and without replay, say), numbers of any shape; what is not finite is left out.
        tau: lines are drawn at ``±log τ``; F(τ), arXiv 2510.11370, is the share of tokens beyond them.
        bins: their number, the same for all labels.
        title: of the figure.
    """
    from torchrl_moe.render.figures import NotebookFigure, legend_above

    check_number("tau", tau, above=1, infinite=True, hint="It bounds a ratio that is 1 where policies agree.")
    check_number("bins", bins, 1, whole=True)
    flat = {label: np.asarray(values, dtype=np.float64).reshape(-1) for label, values in log_ratios.items()}
    flat = {label: values[np.isfinite(values)] for label, values in flat.items()}
    # the same bins for all, symmetric about equal policies
    widest = max((abs(values).max() for values in flat.values() if len(values)), default=0.0)
    edges = np.linspace(-1, 1, bins + 1) * (widest or 1.0)
    figure = NotebookFigure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in flat.items():
        shares = np.histogram(values, edges)[0] / max(1, len(values))
        axes.stairs(shares, edges, label=f"{label}, {len(values)} tokens")
    for bound in (-math.log(tau), math.log(tau)):
        axes.axvline(bound, linestyle=":", color="grey")
    if widest:
        axes.set_yscale("log")
    axes.set(xlabel="log-prob, trainer - engine", ylabel="share of tokens")
    axes.grid(alpha=0.3)
    legend_above(axes, title)
    return figure


def staleness_figure(versions: Sequence[npt.ArrayLike], trained: Sequence[int], title: str = "") -> Figure:
    """Draw, for each batch, the oldest, the mean and the newest version that sampled its tokens, and the trainer's.

    Args:
        versions: for each batch, integers of any shape, -1 for tokens that were not sampled:
            ``("policy_versions", "full")``.
        trained: for each batch, the version that it was trained on; that it is behind is its staleness.
        title: of the figure.

    Raises:
        ValueError: not a version for each batch, or a token that is newer than it.
    """
    from torchrl_moe.render.figures import NotebookFigure, legend_above, whole_ticks

    if len(versions) != len(trained):
        raise ValueError(f"there are {len(versions)} batches, and {len(trained)} versions that they were trained on")
    rows = []
    for batch, (tokens, now) in enumerate(zip(versions, trained, strict=True)):
        known = np.asarray(tokens).reshape(-1)
        known = known[known >= 0]  # a batch without a sampled token has a place, and no mark
        if known.size and known.max() > now:
            raise ValueError(f"batch {batch} was trained on version {now}, and has tokens of version {known.max()}")
        if known.size:
            rows.append((batch, known.min(), known.mean(), known.max(), now))
    batches, oldest, mean, last, newest = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    figure = NotebookFigure(figsize=(8, 5.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    above.step(range(len(trained)), trained, where="mid", color="C1", label="trained on")
    above.fill_between(batches, oldest, last, alpha=0.3, color="C0", linewidth=0, label="oldest to newest token")
    above.plot(batches, mean, "o-", color="C0", label="mean of its tokens")
    above.set(ylabel="weight version")
    below.bar(batches, newest - oldest, color="C0", alpha=0.3, label="greatest")
    below.plot(batches, newest - mean, "o-", color="C0", label="mean")
    below.set(ylabel="staleness, versions", xlabel="batch")
    for axes in (above, below):
        whole_ticks(axes.xaxis)
        axes.grid(alpha=0.3)
    whole_ticks(above.yaxis)
    legend_above(above, title or "versions of the weights, batch by batch")
    legend_above(below)
    return figure


def timeline_figure(rows: Sequence[Mapping[str, Any]], title: str = "") -> Figure:
    """Draw one line per replica, one color per phase.

    Args:
        rows: with ``replica`` (-1: the trainer), ``phase``, ``start`` and ``seconds``.
        title: of the figure.
    """
    from torchrl_moe.render.figures import NotebookFigure, legend_above

    replicas = sorted({int(row["replica"]) for row in rows})
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    figure = NotebookFigure(figsize=(8, 1.2 + 0.35 * len(replicas)), layout="constrained")
    axes = figure.subplots()
    for number, phase in enumerate(phases):
        mine = [row for row in rows if row["phase"] == phase]
        axes.barh(
            [replicas.index(int(row["replica"])) for row in mine],
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
