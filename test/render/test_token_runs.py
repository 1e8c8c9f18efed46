"""Tokens in a terminal: in colors, and as lines of text where there are none."""

from __future__ import annotations

import sys

import pytest

from support.token_rollouts import sample, token
from torchrl_moe.render.tokens import make_scale, print_samples, samples_text

SHOWN = [
    sample(
        token("[red]q", part="prompt"),
        token("a", version=0),
        token("↵\n", version=0),
        token("b", version=1),
        3,
        token("o", part="observation"),
    )
]
TEXT = """\
version of the weights that sampled a token: version 0, version 1
sample 0: 6 response tokens
  prompt               [red]q
  response, version 0  a↵
  response, version 1  b
  …                    3 more tokens
  observation          o
"""


def test_each_run_of_one_label_is_a_line() -> None:
    assert samples_text(SHOWN, make_scale(SHOWN)) == TEXT.rstrip("\n")
    assert samples_text([], make_scale([])) == "version of the weights that sampled a token: not known"


def test_a_file_gets_lines_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_samples(SHOWN, make_scale(SHOWN))
    assert capsys.readouterr().out == TEXT


def test_without_rich_it_is_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_samples(SHOWN, make_scale(SHOWN))
    assert capsys.readouterr().out == TEXT


def test_a_terminal_gets_colors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}.items():
        monkeypatch.setenv(name, value)
    print_samples(SHOWN, make_scale(SHOWN))
    shown = capsys.readouterr().out
    assert "\x1b[" in shown and "[red]q" in shown
    black_on_blue = "\x1b[30;48;2;179;221;245m"  # sky blue, on white
    assert f"{black_on_blue}a\x1b[0m" in shown
    assert "more tokens" in shown
