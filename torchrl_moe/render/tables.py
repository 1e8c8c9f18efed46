"""Tables for notebooks: plain text in, HTML out; no scripts, and no colors of their own, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["html_table"]

CELL = "padding: 0.15em 0.7em; border: none; text-align: {}; white-space: nowrap;"
RULE = "border-{}: 1px solid rgba(128, 128, 128, 0.5);"  # visible on white and on black


def html_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str] = (), note: str = ""
) -> str:
    """Return a table as HTML; every text is escaped.

    Args:
        title: above the table.
        header: names of the columns.
        rows: texts, one per column. The first two columns stand left, as names do, the others right.
        footer: a last row, set off by a rule: totals.
        note: below the table.

    Raises:
        ValueError: a row of another length than the header.
    """
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
    style = f'style="background: transparent; {rule}"'
    return f"<tr {style}>{''.join(_cell(tag, position, text) for position, text in enumerate(cells))}</tr>"


def _cell(tag: str, position: int, text: str) -> str:
    return f'<{tag} style="{CELL.format("left" if position < 2 else "right")}">{escape(text)}</{tag}>'
