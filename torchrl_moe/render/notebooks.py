"""Whether a notebook is there to show something, and showing it."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["in_notebook", "show_html"]


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; nothing is imported to know that."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def show_html(html: str, text: str) -> None:
    """Show HTML in a notebook; where that shows none, in a diff, say, it shows the text."""
    from IPython import display

    show: Any = display.display  # it has no types
    show({"text/html": html, "text/plain": text}, raw=True)
