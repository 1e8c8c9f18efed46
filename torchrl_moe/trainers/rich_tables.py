"""The tables that a training run prints: rich's; rich is an extra."""

from __future__ import annotations

try:
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise ImportError("the trainer's tables need rich: pip install 'torchrl_moe[train]'") from error

__all__ = ["Console", "Table"]
