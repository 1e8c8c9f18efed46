"""Which weights a batch was sampled with, against those it is trained on, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrl_moe.render.legends import legend_above

__all__ = ["staleness_figure"]


def staleness_figure(versions: Sequence[Any], trained: Sequence[int], title: str = "") -> Any:
    """Draw, for each batch, the oldest, the mean and the newest version that sampled its tokens, and the trainer's.

    Args:
        versions: for each batch, integers of any shape, -1 for tokens that were not sampled:
            ``("policy_versions", "full")``.
        trained: for each batch, the version that it was trained on; that it is behind is its staleness.
        title: of the figure.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        ValueError: not a version for each batch, or a token that is newer than it.
    """
    from torchrl_moe.render.figures import NotebookFigure, whole_ticks

    if len(versions) != len(trained):
        raise ValueError(f"there are {len(versions)} batches, and {len(trained)} versions that they were trained on")
    rows = []
    for batch, (tokens, now) in enumerate(zip(versions, trained, strict=True)):
        known = np.asarray(tokens).reshape(-1)
        known = known[known >= 0]
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
