"""The trainer script, short: its machinery holds, and faults on purpose fail the same checks."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import set_list_to_stack

from engines import EngineShelf

ROOT = Path(__file__).parents[3]
GRPO = ROOT / "tutorials" / "grpo"
DLOGP_BOUND, RISE = 1e-4, 0.2
SHORT = ("rollout.answers=64", "train.steps=16", "eval.every=8", "train.checkpoint_every=4")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts import each other by name, as they do when one is run."""
    sys.path.insert(0, str(GRPO))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with set_list_to_stack(True):
        yield
    torch.set_num_threads(threads)
    sys.path.remove(str(GRPO))


@pytest.fixture(scope="module")
def first_run(shelf: EngineShelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A finished short run; its engine serves the runs after it."""
    from settings import load_settings
    from train import Run

    shelf.clear()
    run = Run(load_settings([f"out={tmp_path_factory.mktemp('run')}", *SHORT]))
    try:
        run.train()
        run.finish()
        yield run
    finally:
        run.shutdown()


def rows_of(run: Any) -> list[dict[str, str]]:
    with (run.folder.path / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def failed_checks(rows: list[dict[str, str]]) -> set[str]:
    """Names of the checks of a healthy run that these metrics fail."""
    reward = [float(row["reward"]) for row in rows]
    checks = {
        "versions": [int(row["version"]) for row in rows] == [i + 1 for i in range(len(rows))],
        # each rollout was made with the weights that the step before has sent: agreement after every sync
        "agreement": max(float(row["dlogp_max"]) for row in rows) <= DLOGP_BOUND,
        "learning": sum(reward[-3:]) / 3 - sum(reward[:3]) / 3 >= RISE,
    }
    return {name for name, good in checks.items() if not good}


@pytest.mark.engine
def test_a_short_run_passes_every_check_and_leaves_its_records(first_run: Any) -> None:
    rows, folder = rows_of(first_run), first_run.folder.path
    assert failed_checks(rows) == set()
    assert [int(row["step"]) for row in rows] == list(range(16))
    assert next(name for name in rows[0] if "reward" in name) == "reward"
    assert [bool(row["held_out_reward"]) for row in rows] == [i in (0, 7, 15) for i in range(16)]
    names = {path.name for path in folder.iterdir()}
    assert {"metrics.csv", "config.yaml", "versions.json", "checkpoint.pt", "run.png", "model"} <= names
    assert list(folder.rglob("events.out.tfevents*"))


@pytest.mark.engine
def test_the_exported_model_is_the_trained_one(first_run: Any) -> None:
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(first_run.folder.path / "model", dtype=torch.float32).state_dict()
    trained = first_run.model.state_dict()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("control", "steps", "noticed"),
    [
        ("shift_routes", 2, "agreement"),
        ("wrong_ids", 2, "agreement"),
        ("no_sync", 6, "agreement"),
        ("shuffle_advantages", 16, "learning"),
    ],
)
def test_a_fault_on_purpose_is_noticed(first_run: Any, tmp_path: Path, control: str, steps: int, noticed: str) -> None:
    from settings import load_settings
    from train import Run

    settings = load_settings([f"out={tmp_path}", *SHORT, f"control={control}", f"train.steps={steps}"])
    run = Run(settings, engine=first_run.engine)
    try:
        run.train()
    finally:
        run.shutdown()
    assert noticed in failed_checks(rows_of(run))


@pytest.mark.engine
def test_a_killed_run_goes_on_from_its_checkpoint(first_run: Any, tmp_path: Path) -> None:
    from settings import load_settings
    from train import Run

    arguments = [f"out={tmp_path}", *SHORT, "train.steps=10"]
    run = Run(load_settings(arguments), engine=first_run.engine)
    rollouts = iter(run.collector)
    for step in range(6):  # the last checkpoint is that of step 4
        run.folder.add(run.step(step, rollouts))
        if step + 1 == 4:
            run.checkpoint(4)
            kept = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.shutdown()

    again = Run(load_settings([*arguments, "resume=true"]), engine=first_run.engine)
    try:
        assert again.first_step == 4 and again.sender.version == 4
        assert all(torch.equal(value, kept[name]) for name, value in again.model.state_dict().items())
        again.train()
    finally:
        again.shutdown()
    rows = rows_of(again)
    assert [int(row["step"]) for row in rows] == list(range(10))
    assert [int(row["version"]) for row in rows] == list(range(1, 11))
    assert "agreement" not in failed_checks(rows)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nonsense=1"], "nonsense"),
        (["engine.num_replicas=0"], "engine.num_replicas=0 must be a positive whole number"),
        (["rollout.answers=100"], "rollout.answers=100 is not a multiple of rollout.group_size=8"),
        (["model.path=./no/such/folder"], "model.path=./no/such/folder: there is no model in that folder"),
        (["replay=R4"], "replay=R4 must be R3, R2 or none"),
        (["control=chaos"], "control=chaos must be one of"),
        (["model.num_experts_per_tok=9"], "model.num_experts_per_tok=9 must be in 1..8"),
        (["resume=true", "out=./no/such/run"], "there is no"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from train import main

    assert main(overrides) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_a_dense_model_cannot_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from train import main

    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    path = save_tiny_moe(tmp_path / "dense", "qwen3")
    assert main([f"model.path={path}", f"out={tmp_path / 'run'}"]) == 2
    assert "dense model" in capsys.readouterr().err


def test_help_prints_every_knob() -> None:
    done = subprocess.run(
        [sys.executable, str(GRPO / "train.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "group_size: 8" in done.stdout
