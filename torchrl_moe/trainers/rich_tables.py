"""The tables that a training run prints: rich's; rich is an extra."""

from __future__ import annotations

import io

try:
    from rich.console import Console
    from rich.table import Table as RichTable
except ImportError as error:
    raise ImportError("the trainer's tables need rich: pip install 'torchrl_moe[train]'") from error

__all__ = ["Console", "Table"]


class Table(RichTable):
    """A table of rich's that is readable text where it is printed; terminals and notebooks draw it as rich does."""

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None)
        console.print(self)
        return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]  # a StringIO
