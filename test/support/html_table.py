"""A table as HTML, read back."""

from __future__ import annotations

from html.parser import HTMLParser


class TableReader(HTMLParser):
    """The texts of each row, by the part of the table it stands in."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: dict[str, list[list[str]]] = {"thead": [], "tbody": [], "tfoot": []}
        self.other: list[str] = []
        self.feed(html)
        assert self.tags == []  # all closed

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in {"table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "div"}
        if tag == "tr":
            self.rows[self.tags[-1]].append([])
        elif tag in ("th", "td"):
            self.rows[self.tags[-2]][-1].append("")
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("th", "td"):
            self.rows[self.tags[-3]][-1][-1] += data
        elif data.strip():
            self.other.append(data)
