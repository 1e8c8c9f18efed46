"""The experts of a rollout, token by token: a map for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrl_moe import _checks

__all__ = ["routes_figure"]

LAYERS = 4
"""How many are drawn if none are named."""


def routes_figure(
    routes: Any, layers: Sequence[int] | None = None, *, prompt: int | None = None, title: str = ""
) -> Any:
    """Draw which experts each token of a rollout was routed to: tokens from left to right, experts from the bottom up.

    Args:
        routes: integers ``[T, L, K]``, -1 where no route is known: ``td[0]["routed_experts", "full"]``. Tokens without
            a route are grey.
        layers: those that are drawn, each in a panel; default: up to four of those with routes, evenly apart.
        prompt: tokens of the prompt; a line is drawn after them.
        title: of the figure.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        ValueError: routes of another shape, no integers, or a layer that there is not.
    """
    from torchrl_moe.render.figures import NotebookFigure, whole_ticks

    rows = np.asarray(routes)
    _checks.check_rank("routes", rows, 3, hint="It is [T, L, K], of one rollout: index the batch first.")
    _checks.check_integer("routes", rows, signed=True)
    drawn = _spread(rows) if layers is None else list(layers)
    for layer in drawn:
        if not 0 <= layer < rows.shape[1]:
            raise ValueError(f"layers must be in 0..{rows.shape[1] - 1}, got {layer}")
    figure = NotebookFigure(figsize=(9, 1.0 + 1.6 * max(1, len(drawn))), layout="constrained")
    panels = figure.subplots(max(1, len(drawn)), sharex=True, squeeze=False)[:, 0]
    experts = int(rows.max(initial=0)) + 1
    for axes, layer in zip(panels, drawn, strict=False):
        axes.set_facecolor("lightgrey")
        image = np.where(rows[:, layer, 0] >= 0, np.zeros((experts, 1)), np.nan)  # nan is drawn as nothing
        token, place = (rows[:, layer] >= 0).nonzero()
        image[rows[token, layer, place], token] = 1.0
        axes.imshow(image, aspect="auto", interpolation="nearest", origin="lower", vmin=0.0, vmax=1.0, cmap="viridis")
        axes.set_ylabel(f"layer {layer}\nexpert")
        whole_ticks(axes.xaxis)
        whole_ticks(axes.yaxis, 4)
        if prompt is not None:
            axes.axvline(prompt - 0.5, color="C1", linestyle="--", linewidth=1.5)
    if not drawn:
        panels[0].text(0.5, 0.5, "no route is known", ha="center", va="center", transform=panels[0].transAxes)
    what = "token, the response after the dashed line" if prompt is not None else "token"
    panels[-1].set_xlabel(f"{what}; bright: routed there, grey: no route known")
    figure.suptitle(title or f"experts of {len(rows)} tokens")
    return figure


def _spread(rows: Any) -> list[int]:
    """Return up to four of the layers that have a route, evenly apart."""
    known = (rows[..., 0] >= 0).any(0).nonzero()[0] if rows.size else np.zeros(0, int)
    if len(known) <= LAYERS:
        return [int(layer) for layer in known]
    return [int(known[round(at * (len(known) - 1) / (LAYERS - 1))]) for at in range(LAYERS)]
