"""Tables for notebooks: plain text in, HTML out; no scripts, and no colors of their own, light or dark."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

__all__ = [
    "data_frame",
    "html_table",
    "in_notebook",
    "number_text",
    "one_line",
    "plain_table",
    "print_table",
    "share_text",
    "show_html",
]


def number_text(value: float | None) -> str:
    """Return a number in few characters; ``–`` for what is not known.

    >>> [number_text(value) for value in (True, 12345, 0.25, 1.5e-7, None, float("nan"))]
    ['True', '12,345', '0.25', '1.5e-07', '–', '–']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    # a bool is an int to Python
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:,.4g}"


def share_text(value: float | None) -> str:
    """Return a share of 0 to 1 in percent; ``–`` for what is not known.

    >>> [share_text(value) for value in (0.123, 1.0, None)]
    ['12.3%', '100.0%', '–']
    """
    return "–" if value is None or math.isnan(value) else f"{value:.1%}"


CELL = "padding: 0.15em 0.7em; border: none; text-align: {}; white-space: nowrap;"
RULE = "border-{}: 1px solid rgba(128, 128, 128, 0.5);"  # visible on white and on black


def html_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str] = (), note: str = ""
) -> str:
    """Return a table as HTML; every text is escaped."""
    for row in (*rows, *([footer] if footer else [])):
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, the header {len(header)}: {row!r}")
    lines = [
        '<table style="border-collapse: collapse; color: inherit; background: transparent;">',
        f'<caption style="text-align: left; color: inherit;">{escape(title)}</caption>' if title else "",
        "<thead>",
        _row("th", header, RULE.format("bottom")),
        "</thead>",
        "<tbody>",
        *(_row("td", row) for row in rows),
        "</tbody>",
        *(["<tfoot>", _row("td", footer, RULE.format("top")), "</tfoot>"] if footer else []),
        "</table>",
        f"<div>{escape(note)}</div>" if note else "",
    ]
    return "\n".join(filter(None, lines))


def _row(tag: str, cells: Sequence[str], rule: str = "") -> str:
    row = f'<tr style="background: transparent; {rule}">'
    for position, text in enumerate(cells):
        row += f'<{tag} style="{CELL.format("left" if position < 2 else "right")}">{escape(text)}</{tag}>'
    return f"{row}</tr>"


WIDTH = 140
"""Characters of a line where it is not a terminal's."""


def one_line(text: str, characters: int) -> str:
    """Return a text in one line of printable characters, its middle cut out if it is long.

    >>> one_line("a\\nb\\x1b[31m", 80)
    'a\\\\nb\\\\x1b[31m'
    >>> one_line("abcdefghi", 5)
    'ab…hi'
    """
    # by hand: torchrl_moe._checks would load torch for every command that prints a table
    if not isinstance(characters, Integral) or characters < 1:
        raise ValueError(f"characters must be an integer of at least 1, got {characters!r}")
    # a text of megabytes is cut before it is made printable, which makes it longer
    if len(text) <= characters:
        text = _printable(text)
        if len(text) <= characters:
            return text
    tail = (characters - 1) // 2
    head = characters - 1 - tail
    return f"{_printable(text[:head])[:head]}…{_printable(text[-tail:])[-tail:] if tail else ''}"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], wide: Sequence[str] = ()) -> None:
    """Print a table: by rich, which also knows notebooks, or as plain text in columns."""
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, the header {len(header)}: {row!r}")
    try:
        from rich.box import HORIZONTALS
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain_table(title, header, rows, wide))
        return
    # a Text is shown as it is; a str would be read as rich's markup
    console = Console()
    if not (console.is_terminal or console.is_jupyter):
        console = Console(width=WIDTH)
    table = Table(title=Text(title), title_justify="left", box=HORIZONTALS, show_lines=True, collapse_padding=True)
    for name in header:
        table.add_column(Text(name), justify="left" if name in wide else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], wide: Sequence[str] = ()) -> str:
    """Return a table as text, in columns; arguments as in :func:`print_table`, but that no line is broken.

    >>> print(plain_table("sizes", ["name", "bytes"], [["a", "1"], ["b", "20"]], wide=["name"]))
    sizes
    name  bytes
    a         1
    b        20
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if name in wide else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join([title, *lines])


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a ``DataFrame`` with a row for each mapping, and a column for each of their keys."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("tables need pandas: pip install 'torchrl_moe[render]'") from error
    return pandas.DataFrame(rows)


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; nothing is imported to know that."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def show_html(html: str, text: str) -> None:
    """Show HTML in a notebook; where that shows none, in a diff, say, it shows the text."""
    from IPython import display

    show: Callable[..., object] = display.display
    show({"text/html": html, "text/plain": text}, raw=True)
