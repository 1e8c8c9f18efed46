"""The bar counts requests and tokens, or is not seen."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe.modules.serving.service import Progress

COMPLETION: Any = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * 5)])


def test_on_a_terminal_it_counts_requests_and_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(2, shown=True, what="score") as progress:
        progress.add(COMPLETION)
        progress.add(COMPLETION)
        assert progress._tokens == 10
    text = capsys.readouterr().err
    assert "score" in text
    assert "2/2" in text
    assert "tok/s" in text
    with Progress(2, shown=False) as progress:
        progress.add(COMPLETION)
    assert capsys.readouterr().err == ""


def test_a_log_file_gets_none(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, shown=True) as progress:
        progress.add(COMPLETION)
    assert capsys.readouterr().err == ""
