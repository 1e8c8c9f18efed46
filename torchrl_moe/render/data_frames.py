"""Rows as a pandas ``DataFrame``; pandas is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["data_frame"]


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a ``DataFrame`` with a row for each mapping, and a column for each of their keys.

    Raises:
        ImportError: pandas is missing; the message names the extra.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("tables need pandas: pip install 'torchrl_moe[render]'") from error
    return pandas.DataFrame(rows)
