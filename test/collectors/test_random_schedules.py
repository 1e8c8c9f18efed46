"""Whatever a trainer, an environment and an engine do, and when: no prompt is lost, and none is trained twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.trainer import Plan, Trainer

ACTIONS = ["take"] * 8 + ["update", "cut", "kill", "freeze", "pause", "evaluate", "save", "crash", "move"]
COMMON: dict[str, Any] = {"database": None, "suppress_health_check": list(HealthCheck)}


@st.composite
def plans(draw: st.DrawFn, answers: int) -> Plan:
    """Args: answers: about how many are in line at a time, at most."""
    prompts = draw(st.integers(3, 12))
    bad = draw(st.lists(st.sampled_from([f"q{i}" for i in range(prompts)]), unique=True, max_size=prompts // 2))
    failing = draw(st.integers(0, len(bad)))
    on_stale = draw(st.sampled_from(["wait", "drop"]))
    staleness, per_batch = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    room = answers // ((staleness + 1) * per_batch)
    return Plan(
        group_size=draw(st.integers(1, max(1, min(room, 4)))),
        groups_per_batch=per_batch,
        max_staleness=staleness,
        order=draw(st.sampled_from(["fifo", "window", "ready"])),
        window=draw(st.sampled_from([0.1, 0.3, 1.0])),
        on_stale=on_stale,
        over_sample=draw(st.sampled_from([1.0, 1.5, 2.0])) if on_stale == "drop" else 1.0,
        max_in_flight=draw(st.sampled_from(["auto", 1, 5])),
        prompts=prompts,
        seed=draw(st.integers(0, 1 << 16)),
        failing=frozenset(bad[:failing]),
        filtered=frozenset(bad[failing:]),
        turns=draw(st.sampled_from([1, 1, 1, 2])),
        is_shared=draw(st.booleans()),
        replicas=draw(st.integers(1, 3)),
        updates_once=draw(st.booleans()),
    )


def actions(count: int) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=count)


def play(plan: Plan, actions: list[str]) -> None:
    trainer = Trainer(plan)
    try:
        for action in actions:
            getattr(trainer, action)()
        trainer.settle()
        trainer.take()
    finally:
        trainer.close()


@settings(max_examples=30, derandomize=True, **COMMON)
@given(plans(4), actions(5))
def test_no_prompt_is_lost_or_trained_twice(plan: Plan, actions: list[str]) -> None:
    play(plan, actions)


@pytest.mark.soak
@settings(max_examples=1000, print_blob=True, **COMMON)
@given(plans(24), actions(12))
def test_no_prompt_is_lost_or_trained_twice_in_a_thousand_schedules(plan: Plan, actions: list[str]) -> None:
    play(plan, actions)
