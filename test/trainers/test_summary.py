"""The summary of a run: its numbers by hand, and no word on replay where none was measured."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from torchrl_moe.trainers.run_record import summary


def row(step: int, **changes: Any) -> dict[str, Any]:
    seconds = {f"seconds_{phase}": 0.25 for phase in ("generate", "score", "train", "sync")}
    mismatch = {"dlogp_mean": 0.001, "dlogp_live": 0.004, "agreement": 0.9}
    return {"step": step, "reward": step / 10, "held_out_reward": "", **seconds, **mismatch, **changes}


def text_of(rows: list[dict[str, Any]], held_out: float | None = 0.75) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(summary(rows, held_out))
    return stream.getvalue()


def test_the_numbers_are_those_of_the_rows() -> None:
    rows = [row(step) for step in range(10)]
    rows[0] |= {"held_out_reward": 0.5, "dlogp_live": 0.013, "agreement": 0.8}  # means 0.0049 and 0.89
    rows[4] |= {"held_out_reward": 0.6}
    text = text_of(rows)
    assert "0.20 -> 0.70" in text  # of 0, .1, .2, .3, .4 and of .5, .6, .7, .8, .9
    assert "0.50 -> 0.75" in text
    assert "4.9e-03" in text and "1.0e-03" in text and "89.0%" in text
    assert "replay removes" in text and "80% of the mismatch" in text  # 1 - 1 / 4.9


def test_it_is_text_where_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print(summary([row(0)], None))
    shown = capsys.readouterr().out
    assert "mean rollout reward, first and last 5 steps" in shown and "0.00 -> 0.00" in shown and "<rich" not in shown


def test_replay_that_adds_to_the_mismatch_is_shown_as_such() -> None:
    text = text_of([row(0, dlogp_mean=0.006)])
    assert "replay adds" in text and "50% of the mismatch" in text


@pytest.mark.parametrize("missing", ["dlogp_live", "agreement"])
def test_without_replay_there_is_nothing_to_say_about_it(missing: str) -> None:
    rows = [row(step, **{missing: ""}) for step in range(3)]
    assert "replay" not in text_of(rows)


def test_a_run_that_was_never_evaluated_shows_its_end() -> None:
    text = text_of([row(0)])
    assert "0.75" in text and "-> 0.75" not in text


def test_a_run_without_held_out_prompts_says_nothing_of_them() -> None:
    assert "held-out" not in text_of([row(0)], None)
