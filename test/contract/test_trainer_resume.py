"""A run that is killed and resumed is the run that was never killed: losses, data, weights and random states."""

from __future__ import annotations

import csv
import hashlib
import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import set_list_to_stack

from support.training import fake_config, fake_fleet, fake_run
from torchrl_moe.trainers import GRPOConfig, MoEGRPOTrainer

STEPS, KILLED_IN = 6, 3
HOOKS = ("batch_process", "process_optim_batch", "post_steps", "post_steps_log")
"""Before the update; before its second half; after the weights went to the engine; after the step was recorded."""
WRITING = "a checkpoint that is being written"
TIMED = ("seconds_", "tokens_per_second")


def config_of(out: Path, resume: bool = False, max_staleness: int = 0) -> GRPOConfig:
    config = fake_config(out, STEPS)
    config.resume, config.checkpoint.every, config.log.samples = resume, 2, 4
    config.optim.minibatches, config.optim.lr = 2, 1e-2
    config.eval.mismatch_every = 1
    config.rollout.max_staleness = max_staleness
    config.rollout.sampling = {"seed": 11}  # each answer has its own, by its place in the run
    return config


def kill_at(trainer: MoEGRPOTrainer, point: str) -> None:
    """End the process as a lost machine would, in the fourth step or in what it writes."""

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if point == WRITING:
        write = type(trainer.checkpoints._trained).write

        def half(state: Any, folder: Path, ranks: Any) -> None:
            write(state, folder, ranks)
            if trainer.steps_done > KILLED_IN:
                kill()

        trainer.checkpoints._trained.write = half  # type: ignore[method-assign]
        return
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        # of the parts of a step, the second
        if trainer.steps_done >= KILLED_IN and (point != "process_optim_batch" or calls % 2 == 0):
            trainer.checkpoints.wait()
            kill()

    trainer.register_op(point, count)


def run(out: Path, point: str, resume: bool, max_staleness: int) -> None:
    """One start of a run, in a process of its own; what it ends with is in ``end.json``."""
    torch.set_num_threads(1)
    with set_list_to_stack(True), fake_fleet() as fleet:
        fleet.set_seed = lambda seed: None  # type: ignore[method-assign, assignment]  # a fake's log-probs depend on it
        rows = [{"prompt": f"{i}+1="} for i in range(40)]  # more than a run trains on
        trainer = fake_run(fleet, config_of(out, resume, max_staleness), dataset=rows)
        if point:
            kill_at(trainer, point)
        trainer.train()
        weights = hashlib.sha256()
        for weight in trainer.policy_model.trained.values():
            weights.update(weight.detach().numpy().tobytes())
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        (out / "end.json").write_text(json.dumps({"weights": weights.hexdigest(), "draws": draws}))
        trainer.shutdown()


def start(out: Path, point: str = "", resume: bool = False, max_staleness: int = 0) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=run, args=(out, point, resume, max_staleness))
    process.start()
    process.join(300)
    if process.is_alive():
        process.kill()
        pytest.fail("the run does not end")
    return process.exitcode


def traces(out: Path) -> dict[str, Any]:
    """All that a run leaves, but for seconds."""
    with (out / "metrics.csv").open(newline="") as lines:
        rows = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in csv.DictReader(lines)]
    return {"rows": rows, "samples": (out / "samples.jsonl").read_text(), **json.loads((out / "end.json").read_text())}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert start(out) == 0
    found = traces(out)
    # it is worth comparing: answers and losses differ from step to step
    assert len({row["loss"] for row in found["rows"]}) == len(found["rows"]) == STEPS
    assert len({json.loads(line)["completion"] for line in found["samples"].splitlines()}) > STEPS
    return found


SELDOM = [pytest.param(point, marks=pytest.mark.soak) for point in HOOKS if point != "process_optim_batch"]


@pytest.mark.parametrize("point", ["process_optim_batch", WRITING, *SELDOM])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, uninterrupted: dict[str, Any], point: str) -> None:
    assert start(tmp_path / "run", point) == -signal.SIGKILL
    assert not (tmp_path / "run" / "end.json").exists()
    assert start(tmp_path / "run", resume=True) == 0
    assert traces(tmp_path / "run") == uninterrupted


@pytest.mark.soak  # that of the collector alone is in ``test_collector_schedules.py``
@pytest.mark.parametrize("point", ["process_optim_batch", "post_steps_log"])
def test_while_answers_are_generated_ahead_a_killed_run_trains_on_each_prompt_once(tmp_path: Path, point: str) -> None:
    out = tmp_path / "run"
    assert start(out, point, max_staleness=2) == -signal.SIGKILL
    assert start(out, resume=True, max_staleness=2) == 0
    trained = Counter(json.loads(line)["prompt"] for line in (out / "samples.jsonl").read_text().splitlines())
    assert len(trained) == 2 * STEPS and set(trained.values()) == {2}  # both answers
    assert [row["step"] for row in traces(out)["rows"]] == [str(step) for step in range(STEPS)]
