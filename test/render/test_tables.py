"""A table as HTML: read back by a parser, with nothing in it that runs or that a text could break out of."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from torchrl_moe.render.tables import html_table


class Reader(HTMLParser):
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


def test_title_header_rows_totals_and_note_stand_in_their_places() -> None:
    read = Reader(html_table("two replicas", ["name", "n"], [["#0", "1"], ["#1", "2"]], ["all", "3"], "and more"))
    assert read.rows == {"thead": [["name", "n"]], "tbody": [["#0", "1"], ["#1", "2"]], "tfoot": [["all", "3"]]}
    assert read.other == ["two replicas", "and more"]


def test_what_is_not_given_leaves_no_trace() -> None:
    html = html_table("", ["name"], [])
    assert Reader(html).rows == {"thead": [["name"]], "tbody": [], "tfoot": []}
    for tag in ("caption", "tfoot", "div"):
        assert tag not in html


def test_every_text_is_escaped() -> None:
    nasty = "<script>alert('1')</script> & \"x\""
    html = html_table(nasty, [nasty], [[nasty]], [nasty], nasty)
    read = Reader(html)  # refuses any tag that is not a table's
    assert read.rows == {"thead": [[nasty]], "tbody": [[nasty]], "tfoot": [[nasty]]}
    assert read.other == [nasty, nasty]
    assert "<script" not in html


def test_no_colour_is_set_but_that_of_the_rules() -> None:
    html = html_table("t", ["a"], [["b"]], ["c"])
    assert "color: inherit" in html
    assert "#" not in html


@pytest.mark.parametrize(("rows", "footer"), [([["a"]], ["a", "b"]), ([["a", "b"]], ["a"])])
def test_a_row_of_another_length_is_refused(rows: list[list[str]], footer: list[str]) -> None:
    with pytest.raises(ValueError, match="a row has 1 cells, the header 2"):
        html_table("", ["x", "y"], rows, footer)
