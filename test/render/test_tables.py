"""Tables in notebooks and terminals, whatever the texts hold, and numbers as people read them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch

from support.html_table import TableReader
from torchrl_moe.render.tables import data_frame, html_table, in_notebook, number_text, one_line, print_table, show_html


def test_title_header_rows_totals_and_note_stand_in_their_places_and_are_escaped() -> None:
    bad = ["<script>alert('1')</script> & \"x\"" + str(i) for i in range(6)]
    html = html_table(bad[0], [bad[1], "n"], [[bad[2], "1"], [bad[3], "2"]], [bad[4], "3"], bad[5])
    read = TableReader(html)  # refuses any tag that is not a table's
    assert read.rows == {"thead": [[bad[1], "n"]], "tbody": [[bad[2], "1"], [bad[3], "2"]], "tfoot": [[bad[4], "3"]]}
    assert read.other == [bad[0], bad[5]] and "<script" not in html


@pytest.mark.parametrize(("rows", "footer"), [([["a"]], ["a", "b"]), ([["a", "b"]], ["a"])])
def test_a_row_of_another_length_is_refused(rows: list[list[str]], footer: list[str]) -> None:
    with pytest.raises(ValueError, match="a row has 1 cells, the header 2"):
        html_table("", ["x", "y"], rows, footer)
    with pytest.raises(ValueError, match="a row has 1 cells, the header 2"):
        print_table("", ["x", "y"], [*rows, ["a"]])


NASTY = "[red]x[/red] [/] :smile: \\[bold]"
HEADER = ("name", "text", "n")


@pytest.mark.parametrize(
    ("text", "characters", "expected"),
    [
        ("", 5, ""), ("abcde", 5, "abcde"), ("abcdef", 5, "ab…ef"), ("abcdef", 4, "ab…f"), ("abcdef", 2, "a…"),
        ("abcdef", 1, "…"), ("a\nb\tc", 10, r"a\nb\tc"), ("\x1b[31m", 20, r"\x1b[31m"),
        ("\u202eabc", 20, r"\u202eabc"), ("\ud800", 20, r"\ud800"), ("π ≈ 3", 20, "π ≈ 3"),
        ("\n\n\n", 5, r"\n…\n"),  # longer once it is printable
    ],
)  # fmt: skip
def test_a_text_in_one_line(text: str, characters: int, expected: str) -> None:
    assert one_line(text, characters) == expected


def test_no_line_is_longer_than_asked_for_or_cannot_be_printed() -> None:
    every = "".join(map(chr, range(0x3000))) + "\udfff\U000e0001"
    for characters in range(1, 60):
        line = one_line(every * 2, characters)
        assert len(line) == characters and line.isprintable()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        one_line("a", 0)


def test_rich_prints_cells_as_they_are(capsys: CaptureFixture[str]) -> None:
    print_table("[bold]two", HEADER, [("a", NASTY, "1"), ("bb", "", "20")], wide=("text",))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "[bold]two" in printed and NASTY in printed
    (line,) = (line for line in printed.splitlines() if NASTY in line)
    assert line.split()[0] == "a" and line.split()[-1] == "1"


def test_without_rich_it_is_columns_of_text(capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich.box", None)
    print_table("two", HEADER, [("a", "[red]", "1"), ("bb", "", "20")], wide=("text",))
    assert capsys.readouterr().out.splitlines() == ["two", "name  text    n", "   a  [red]   1", "  bb         20"]


def test_each_row_is_a_row_and_without_pandas_the_extra_is_named(monkeypatch: MonkeyPatch) -> None:
    table = data_frame([{"step": 0, "reward": 0.5}, {"step": 1, "reward": 0.75}])
    assert table.to_dict("list") == {"step": [0, 1], "reward": [0.5, 0.75]}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"tables need pandas: pip install 'torchrl_moe\[render\]'"):
        data_frame([{"step": 0}])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (2.0, "2"), (0.12345, "0.1235"), (1e20, "1e+20"), (float("inf"), "inf"), (-3.5, "-3.5"), (None, "–")],
)
def test_a_number(value: float | None, expected: str) -> None:
    assert number_text(value) == expected


@pytest.mark.parametrize(
    ("shell", "expected"), [(None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True)]
)
def test_a_notebook_has_a_kernel(shell: Any, expected: bool, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert in_notebook() is expected


def test_html_is_shown_with_its_text(monkeypatch: MonkeyPatch) -> None:
    shown: list[Any] = []
    fake = SimpleNamespace(display=lambda data, raw: shown.append((data, raw)))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=fake))
    show_html("<b>a</b>", "a")
    assert shown == [({"text/html": "<b>a</b>", "text/plain": "a"}, True)]
