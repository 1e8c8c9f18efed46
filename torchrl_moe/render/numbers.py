"""Numbers as people read them."""

from __future__ import annotations

import math

__all__ = ["number_text", "share_text"]


def number_text(value: float | None) -> str:
    """Return a number in few characters; ``–`` for what is not known.

    >>> [number_text(value) for value in (True, 12345, 0.25, 1.5e-7, None, float("nan"))]
    ['True', '12,345', '0.25', '1.5e-07', '–', '–']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:,.4g}"


def share_text(value: float | None) -> str:
    """Return a share of 0 to 1 in percent; ``–`` for what is not known.

    >>> [share_text(value) for value in (0.123, 1.0, None)]
    ['12.3%', '100.0%', '–']
    """
    return "–" if value is None or math.isnan(value) else f"{value:.1%}"
