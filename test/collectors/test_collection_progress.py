"""The bar counts answers, ends with the collection or its error, and outlives a Ctrl-C."""

from __future__ import annotations

import pytest

from torchrl_moe.collectors.reports import CollectionProgress


def last_line(text: str) -> str:
    return text.replace("\r", "\n").rstrip("\n").split("\n")[-1]


def test_it_continues_from_answers_that_were_there_before(capsys: pytest.CaptureFixture[str]) -> None:
    with CollectionProgress(-1, shown=True) as progress:
        progress.begin(6)
        progress.show(10, {})
    assert "10answer" in last_line(capsys.readouterr().err)


def test_it_ends_with_an_error_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    progress = CollectionProgress(8, shown=True)
    with pytest.raises(ValueError), progress:
        progress.begin(0)
        raise ValueError
    assert capsys.readouterr().err.endswith("\n")
    progress.show(4, {})
    progress.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_what_may_continue_leaves_it(kind: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    progress = CollectionProgress(8, shown=True)
    with pytest.raises(kind), progress:
        progress.begin(0)
        raise kind
    progress.show(4, {})
    progress.close()
    assert "4/8" in last_line(capsys.readouterr().err)
