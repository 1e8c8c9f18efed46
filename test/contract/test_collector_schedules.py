"""Whatever a trainer, an environment and an engine do, and when: no prompt is lost, and none is trained twice."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.trainer import DONE, PROMPTS, Plan, Trainer, checkpoint, life
from support.waiting import PATIENCE

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


@settings(max_examples=10, derandomize=True, **COMMON)
@given(plans(4), actions(5))
def test_no_prompt_is_lost_or_trained_twice(plan: Plan, actions: list[str]) -> None:
    play(plan, actions)


@pytest.mark.soak
@settings(max_examples=1000, print_blob=True, **COMMON)
@given(plans(24), actions(12))
def test_no_prompt_is_lost_or_trained_twice_in_a_thousand_schedules(plan: Plan, actions: list[str]) -> None:
    play(plan, actions)


MOST = 12
"""Steps after which a trainer is killed at the latest: an epoch without a checkpoint has 12 batches."""


def run(folder: Path, order: str, steps: float) -> bool:
    """Start a trainer, and kill it after so many steps; whether it came to its end."""
    with life(folder, order) as (process, progress):
        for step in itertools.count(1):
            assert progress.poll(PATIENCE)
            if progress.recv() == DONE:
                process.join(PATIENCE)
                assert process.exitcode == 0
                return True
            if step >= steps:
                process.kill()
                process.join()
                assert process.exitcode in (-9, 0)
                return process.exitcode == 0  # it was quicker
    raise AssertionError


def check(folder: Path, order: str) -> None:
    saved = checkpoint(folder)
    trained, state = saved["trained"], saved["collector"]
    prompts, ready = state["prompts"], state["ready"]
    waiting = [data["query"] for data in (*prompts["again"].values(), *(entry["data"] for entry in ready))]
    read = [f"q{position % PROMPTS}" for position in range(prompts["position"])]
    assert (Counter(trained + waiting), state["frames"]) == (Counter(read), 2 * len(trained))
    if order == "fifo":  # else prompts of the next epoch may come early
        assert trained == [f"q{i}" for i in range(PROMPTS)]


def live_and_die(folder: Path, order: str, deaths: int) -> None:
    """Epoch after epoch, until there were so many deaths."""
    rng, died = random.Random(f"{order} {deaths}"), 0
    for epoch in itertools.count():
        (at := folder / str(epoch)).mkdir()
        while not run(at, order, rng.randint(1, MOST) if died < deaths else float("inf")):
            died += 1
        check(at, order)
        if died >= deaths:
            return


def test_each_prompt_is_trained_once_though_the_trainer_is_killed(tmp_path: Path) -> None:
    live_and_die(tmp_path, "fifo", 1)


@pytest.mark.soak
@pytest.mark.parametrize("order", ["fifo", "window"])
def test_each_prompt_is_trained_once_though_the_trainer_is_killed_twenty_times(tmp_path: Path, order: str) -> None:
    live_and_die(tmp_path, order, 20)
