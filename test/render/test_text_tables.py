"""Tables as printed: by rich and without it, whatever the texts hold."""

from __future__ import annotations

import sys

import pytest

from torchrl_moe.render.tables import one_line, print_table

NASTY = "[red]x[/red] [/] :smile: \\[bold]"
HEADER = ("name", "text", "n")
ROWS = [("a", NASTY, "1"), ("bb", "", "20")]


@pytest.mark.parametrize(
    ("text", "characters", "expected"),
    [
        ("", 5, ""),
        ("abcde", 5, "abcde"),
        ("abcdef", 5, "ab…ef"),
        ("abcdef", 4, "ab…f"),
        ("abcdef", 2, "a…"),
        ("abcdef", 1, "…"),
        ("a\nb\tc", 10, r"a\nb\tc"),
        ("\n\n\n", 5, r"\n…\n"),  # longer once it is printable
        ("\x1b[31m", 20, r"\x1b[31m"),
        ("\u202eabc", 20, r"\u202eabc"),
        ("\ud800", 20, r"\ud800"),
        ("π ≈ 3", 20, "π ≈ 3"),
    ],
)
def test_a_text_in_one_line(text: str, characters: int, expected: str) -> None:
    assert one_line(text, characters) == expected


def test_no_line_is_longer_than_asked_for_or_cannot_be_printed() -> None:
    every = "".join(map(chr, range(0x3000))) + "\udfff\U000e0001"
    for characters in range(1, 60):
        line = one_line(every * 2, characters)
        assert len(line) == characters and line.isprintable()


def test_a_text_of_no_character_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        one_line("a", 0)


def test_rich_prints_cells_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("[bold]two", HEADER, ROWS, wide=("text",))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "[bold]two" in printed and NASTY in printed
    (line,) = (line for line in printed.splitlines() if NASTY in line)
    assert line.split()[0] == "a" and line.split()[-1] == "1"


def test_without_rich_it_is_columns_of_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich.box", None)
    print_table("two", ("name", "text", "n"), [("a", "[red]", "1"), ("bb", "", "20")], wide=("text",))
    assert capsys.readouterr().out.splitlines() == [
        "two",
        "name  text    n",
        "   a  [red]   1",
        "  bb         20",
    ]


def test_without_rows_the_header_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_table("none", HEADER, [])
    monkeypatch.setitem(sys.modules, "rich.box", None)
    print_table("none", HEADER, [])
    assert capsys.readouterr().out.count("name") == 2


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells, the header 3"):
        print_table("", HEADER, [("a",)])
