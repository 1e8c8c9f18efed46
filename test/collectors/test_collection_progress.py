"""The bar counts answers, ends with the collection or its error, and outlives a Ctrl-C."""

from __future__ import annotations

import pytest

from torchrl_moe.collectors.reports import CollectionProgress


def last_line(text: str) -> str:
    return text.replace("\r", "\n").rstrip("\n").split("\n")[-1]


def test_it_counts_answers_and_shows_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    with CollectionProgress(8, shown=True) as progress:
        progress.begin(0)
        progress.show(2, {"reward": 0.25})
        progress.show(2, {"reward": 0.25})  # again, after a Ctrl-C
        progress.show(8, {"reward": 1.0, "age": 0.5})
    shown = capsys.readouterr()
    assert "8/8" in last_line(shown.err) and "reward=1, age=0.5" in last_line(shown.err)
    assert shown.out == ""


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


def test_nothing_is_printed_if_it_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with CollectionProgress(8, shown=False) as progress:
        progress.begin(0)
        progress.show(4, {"reward": 1.0})
    assert capsys.readouterr() == ("", "")
