"""A table as HTML: read back by a parser, with nothing in it that runs or that a text could break out of."""

from __future__ import annotations

import pytest

from support.html_table import TableReader
from torchrl_moe.render.tables import html_table


def test_title_header_rows_totals_and_note_stand_in_their_places() -> None:
    read = TableReader(html_table("two replicas", ["name", "n"], [["#0", "1"], ["#1", "2"]], ["all", "3"], "and more"))
    assert read.rows == {"thead": [["name", "n"]], "tbody": [["#0", "1"], ["#1", "2"]], "tfoot": [["all", "3"]]}
    assert read.other == ["two replicas", "and more"]


def test_what_is_not_given_leaves_no_trace() -> None:
    html = html_table("", ["name"], [])
    assert TableReader(html).rows == {"thead": [["name"]], "tbody": [], "tfoot": []}
    for tag in ("caption", "tfoot", "div"):
        assert tag not in html


def test_every_text_is_escaped() -> None:
    nasty = "<script>alert('1')</script> & \"x\""
    html = html_table(nasty, [nasty], [[nasty]], [nasty], nasty)
    read = TableReader(html)  # refuses any tag that is not a table's
    assert read.rows == {"thead": [[nasty]], "tbody": [[nasty]], "tfoot": [[nasty]]}
    assert read.other == [nasty, nasty]
    assert "<script" not in html


def test_no_color_is_set_but_that_of_the_rules() -> None:
    html = html_table("t", ["a"], [["b"]], ["c"])
    assert "color: inherit" in html
    assert "#" not in html


@pytest.mark.parametrize(("rows", "footer"), [([["a"]], ["a", "b"]), ([["a", "b"]], ["a"])])
def test_a_row_of_another_length_is_refused(rows: list[list[str]], footer: list[str]) -> None:
    with pytest.raises(ValueError, match="a row has 1 cells, the header 2"):
        html_table("", ["x", "y"], rows, footer)
