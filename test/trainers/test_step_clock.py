"""Seconds of phases, on a clock that a test moves."""

from __future__ import annotations

import pytest

from torchrl_moe.trainers import grpo_trainer as step_clock
from torchrl_moe.trainers.grpo_trainer import StepClock


def test_phases_add_up_and_a_step_begins_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now[0])
    clock = StepClock()
    clock.begin()
    now[0] = 2.0
    clock.end("generate")
    for seconds in (1.0, 0.5):
        with clock("score"):
            now[0] += seconds
    clock.begin_phase()
    now[0] += 4.0
    clock.end("train")
    assert clock.seconds == {"generate": 2.0, "score": 1.5, "train": 4.0}
    clock.begin()
    assert clock.seconds == {}


def test_a_phase_that_raises_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now[0])
    clock = StepClock()
    with pytest.raises(ZeroDivisionError), clock("score"):
        now[0] = 3.0
        raise ZeroDivisionError
    assert clock.seconds == {"score": 3.0}
