"""How many requests each replica had, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_moe.render.legends import legend_above

__all__ = ["load_figure"]


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
    for number, (at, what) in enumerate(events):
        axes.axvline(at, color="grey", linestyle=":")
        axes.annotate(
            what, (at, 1 - 0.08 * (number % 3)), xycoords=axes.get_xaxis_transform(), xytext=(3, -3),
            textcoords="offset points", va="top", fontsize="small",
        )  # fmt: skip
    axes.set(xlabel="seconds", ylabel=quantity, ylim=(0, None))
    axes.grid(alpha=0.3)
    legend_above(axes, title or "load of the replicas")
    return figure
