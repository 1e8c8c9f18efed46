"""A row of numbers as a strip of blocks: a picture of one line, legible wherever text is."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["heat_strip", "strips_html"]

BLOCKS = "▁▂▃▄▅▆▇█"
CELLS = 64
MONOSPACE = "font-family: monospace; white-space: pre; color: inherit; background: transparent; line-height: 1.3;"


def heat_strip(values: Any, top: float | None = None) -> str:
    """Return numbers as blocks, the greater the higher; of more than 64 numbers, each block is the mean of several.

    Args:
        values: ``[N]``, at least 0; NaN is a ``·``.
        top: what the highest block stands for; default: the greatest of them.

    >>> heat_strip([0, 1, 2, 4, float("nan")])
    '▁▃▅█·'
    """
    values = np.asarray(values, dtype=np.float64)
    if len(values) > CELLS:
        parts = np.array_split(values, CELLS)
        values = np.array([np.nan if np.isnan(part).all() else np.nanmean(part) for part in parts])
    known = values[np.isfinite(values)]
    highest = (known.max() if known.size else 0.0) if top is None else top
    steps = np.clip(values / (highest or 1.0), 0, 1) * (len(BLOCKS) - 1)
    return "".join("·" if np.isnan(step) else BLOCKS[int(step + 0.5)] for step in steps)


def strips_html(title: str, lines: Any, note: str = "") -> str:
    """Return lines of text, with strips in them, as HTML that keeps their columns.

    Args:
        title: above them.
        lines: texts; every one is escaped.
        note: below them.
    """
    from html import escape

    body = "\n".join(escape(line) for line in lines)
    head, foot = f"<div>{escape(title)}</div>", f"<div>{escape(note)}</div>" if note else ""
    return f'<div style="color: inherit;">{head}<div style="{MONOSPACE}">{body}</div>{foot}</div>'
