"""Tables for terminals, by rich if it is installed; texts of any kind stay in their cells and are shown as they are."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["one_line", "plain_table", "print_table"]

WIDTH = 140
"""Characters of a line where it is not a terminal's."""


def one_line(text: str, characters: int) -> str:
    """Return a text in one line of printable characters, its middle cut out if it is long.

    Args:
        text: anything; what cannot be printed (line breaks, terminal codes) is shown as Python would write it.
        characters: the most that are returned, at least 1.

    >>> one_line("a\\nb\\x1b[31m", 80)
    'a\\\\nb\\\\x1b[31m'
    >>> one_line("abcdefghi", 5)
    'ab…hi'
    """
    if characters < 1:
        raise ValueError(f"characters must be at least 1, got {characters}")
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
    """Print a table: by rich, which also knows notebooks, or as plain text in columns.

    Args:
        title: above it.
        header: names of the columns.
        rows: texts, one per column. Nothing in them is read as markup.
        wide: columns of running text: they stand left, and are broken into lines; the others stand right.

    Raises:
        ValueError: a row of another length than the header.
    """
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
