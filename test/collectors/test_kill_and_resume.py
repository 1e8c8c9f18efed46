"""A trainer that is killed at any moment and continues from a checkpoint trains each prompt of an epoch once."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from support.epochs import DONE, PROMPTS, checkpoint, life
from support.waiting import PATIENCE

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
