"""In how many rows trainer and engine choose the same experts, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchrl_moe import _checks
from torchrl_moe.render.legends import legend_above

__all__ = ["agreement_figure", "layer_agreement"]


def layer_agreement(recorded: Any, live: Any) -> Any:
    """Return, for each layer, the share of rows in which both sides choose the same set: float64 ``[L]``.

    Args:
        recorded: integers ``[..., L, K]``, the engine's choice.
        live: of the same shape, the trainer's. Rows in which either is -1 do not count.

    Returns:
        NaN in layers without a row.

    >>> layer_agreement(np.array([[[0, 1]], [[0, 2]]]), np.array([[[1, 0]], [[2, 3]]]))
    array([0.5])
    """
    recorded, live = np.asarray(recorded), np.asarray(live)
    _checks.check_same_shape({"recorded": recorded, "live": live})
    for name, values in (("recorded", recorded), ("live", live)):
        _checks.check_integer(name, values, signed=True)
        _checks.check_shape(name, values.shape, (..., "L", "K"))
    theirs, ours = (np.sort(values.reshape(-1, *values.shape[-2:]), axis=-1) for values in (recorded, live))
    known = (theirs[..., -1] >= 0) & (ours[..., -1] >= 0)
    same = known & (theirs == ours).all(-1)
    rows = known.sum(0)
    return np.divide(same.sum(0), rows, out=np.full(len(rows), np.nan), where=rows > 0)


def agreement_figure(agreements: Mapping[str, Any], title: str = "") -> Any:
    """Draw the share of rows with the same experts over the layers; with and without replay, say.

    Args:
        agreements: by label, ``[L]`` in 0..1: of :func:`layer_agreement`, or ``("routing", "agreement")``; NaN, a layer
            without a router, is left out.
        title: of the figure.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        ValueError: values of another rank, or outside of 0..1.
    """
    from torchrl_moe.render.figures import NotebookFigure, whole_ticks

    columns = {label: np.asarray(values, dtype=np.float64) for label, values in agreements.items()}
    for label, values in columns.items():
        _checks.check_rank(label, values, 1, hint="It is [L], a share for each layer.")
        known = values[np.isfinite(values)]
        if known.size and not 0 <= known.min() <= known.max() <= 1:
            raise ValueError(f"{label}: shares must be in 0..1, got {known.min():g}..{known.max():g}")
    figure = NotebookFigure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (label, values) in enumerate(columns.items()):
        layers = np.isfinite(values).nonzero()[0]
        mean = f", mean {values[layers].mean():.1%}" if len(layers) else ""
        axes.plot(layers, values[layers], "os^Dv"[number % 5] + "-", label=f"{label}{mean}")
    axes.set(xlabel="layer", ylabel="share of rows with the same experts", ylim=(-0.02, 1.02))
    whole_ticks(axes.xaxis)
    axes.grid(alpha=0.3)
    legend_above(axes, title or "agreement of trainer and engine")
    return figure
