"""Routes in a notebook: how the load lies on the experts, a strip for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from torchrl_moe.render.strips import heat_strip, strips_html

__all__ = ["ROWS", "routes_html"]

LAYERS = 16
NOTHING = "no route is known"
ROWS = 1 << 16
"""Rows that are counted: of many more the picture would be the same."""


def routes_html(title: str, samples: Iterable[Any]) -> str:
    """Return a strip of load over experts for each layer with routes, the first 16 of them.

    Args:
        title: above them.
        samples: integers ``[T, L, K]`` of each rollout, -1 where no route is known. The first 65 536 rows are counted.
    """
    counts, rows = _count(samples)
    lines = []
    layers = counts.any(-1).nonzero()[0]
    width = len(str(max(layers[:LAYERS], default=0)))
    for layer in layers[:LAYERS]:
        of = counts[layer]
        excess = of.max() * len(of) / of.sum()
        lines.append(f"layer {layer:>{width}}  {heat_strip(of)}  busiest: expert {of.argmax()}, {excess:.3g} × even")
    hidden = len(layers) - len(lines)
    if hidden:
        lines.append(f"and {hidden} more layers with routes")
    note = f"load of experts 0 to {counts.shape[-1] - 1}, left to right, of {rows:,} rows" if lines else NOTHING
    return strips_html(title, lines, note)


def _count(samples: Iterable[Any]) -> tuple[Any, int]:
    """Return how often each expert stands in the rows, ``[L, E]``, and the number of rows."""
    counts, rows = np.zeros((0, 0), np.int64), 0
    for sample in samples:
        ids = np.asarray(sample[: ROWS - rows]).astype(np.int64)
        layers, experts = ids.shape[1], max(counts.shape[1], int(ids.max(initial=-1)) + 1)
        counts = np.pad(counts, ((0, layers - counts.shape[0]), (0, experts - counts.shape[1])))
        places = (ids + experts * np.arange(layers)[:, None])[ids >= 0]
        counts += np.bincount(places, minlength=layers * experts).reshape(layers, experts)
        rows += len(ids)
        if rows >= ROWS:
            break
    return counts, rows
