"""The bar counts requests and tokens, or is not seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchrl_moe.modules.serving.progress import Progress


def test_the_bar_counts_requests_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    completion = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * 5)])
    with Progress(2, shown=True) as progress:
        progress.add(completion)  # type: ignore[arg-type]
        progress.add(completion)  # type: ignore[arg-type]
        assert progress._tokens == 10
    text = capsys.readouterr().err
    assert "2/2" in text
    assert "tok/s" in text
    with Progress(2, shown=False) as progress:
        progress.add(completion)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
