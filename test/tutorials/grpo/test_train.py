"""The trainer script, short: its machinery holds, and faults on purpose fail the same checks."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import set_list_to_stack

from support.engines import EngineShelf, start_engine

ROOT = Path(__file__).parents[3]
GRPO = ROOT / "tutorials" / "grpo"
DLOGP_BOUND = 1e-4
RISE = 0.1  # healthy runs rise by 0.2 and more, those with shuffled advantages by less than 0.05
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


def short(out: Path, *overrides: str) -> list[str]:
    """A short run in which trainer and engine agree to rounding, so that every fault shows."""
    from settings import ONE_DIGIT

    return [f"out={out}", *ONE_DIGIT, *SHORT, *overrides]


@pytest.fixture(scope="module")
def first_run(shelf: EngineShelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A finished short run; its engine serves the runs after it."""
    from settings import load_settings
    from train import Run

    shelf.clear()
    run = Run(load_settings(short(tmp_path_factory.mktemp("run"))))
    try:
        run.train()
        run.finish()
        yield run
    finally:
        run.shutdown()


def trained_model(first_run: Any) -> str:
    """The setting of a run that needs a model with something learned, and no warm-up of its own."""
    return f"model.path={first_run.folder.path / 'model'}"


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
        # over half of the run: one step's 64 answers leave an error of 0.06
        "learning": sum(reward[-8:]) / 8 - sum(reward[:4]) / 4 >= RISE,
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
        pytest.param("no_sync", 6, "agreement", marks=pytest.mark.soak),
        pytest.param("shuffle_advantages", 16, "learning", marks=pytest.mark.soak),
    ],
)
def test_a_fault_on_purpose_is_noticed(first_run: Any, tmp_path: Path, control: str, steps: int, noticed: str) -> None:
    from settings import load_settings
    from train import Run

    starts_from = [trained_model(first_run)] if noticed == "agreement" else []  # a trained one has little to learn
    settings = load_settings(short(tmp_path, *starts_from, f"control={control}", f"train.steps={steps}"))
    run = Run(settings, engine=first_run.engine)
    try:
        run.train()
    finally:
        run.shutdown()
    rows = rows_of(run)
    assert noticed in failed_checks(rows)
    if control in ("shift_routes", "wrong_ids"):  # the live router follows no record: it sees nothing of such a fault
        assert max(float(row["dlogp_live"]) for row in rows) <= DLOGP_BOUND


@pytest.mark.engine
def test_the_engine_may_be_renewed_every_few_steps(first_run: Any, tmp_path: Path) -> None:
    from settings import load_settings
    from train import Run

    settings = load_settings(short(tmp_path, trained_model(first_run), "train.sync_every=2", "train.steps=4"))
    run = Run(settings, engine=first_run.engine)
    try:
        run.train()
    finally:
        run.shutdown()
    rows = rows_of(run)
    assert [int(row["version"]) for row in rows] == [0, 1, 1, 2]
    apart = [float(row["dlogp_max"]) > DLOGP_BOUND for row in rows]
    assert apart == [False, True, False, True]  # every second rollout is of the weights before the last update


def wait_for_rows(metrics: Path, count: int, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and run.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) > count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {count} rows in time; exit code {run.poll()}")


@pytest.mark.engine
def test_a_killed_run_goes_on_from_its_checkpoint(first_run: Any, tmp_path: Path) -> None:
    from settings import load_settings
    from train import Run

    # an older run's checkpoint lies about: it is not this one's
    (tmp_path / "checkpoint.pt").write_bytes(b"stale")
    few = ("rollout.answers=16", "train.checkpoint_every=2", trained_model(first_run))
    command = [sys.executable, str(GRPO / "train.py"), *short(tmp_path, *few, "train.steps=500", "seed=3")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
        wait_for_rows(tmp_path / "metrics.csv", 3, killed)  # the last checkpoint is that of step 2, or a later one
        killed.kill()
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    assert kept["step"] >= 2

    steps = kept["step"] + 2
    again = Run(load_settings([f"out={tmp_path}", "resume=true", f"train.steps={steps}"]), engine=first_run.engine)
    try:
        assert again.settings.seed == 3 and again.settings.rollout.answers == 16
        assert (again.first_step, again.sender.version) == (kept["step"], kept["version"])
        assert all(torch.equal(value, kept["model"][name]) for name, value in again.model.state_dict().items())
        again.train()
    finally:
        again.shutdown()
    rows = rows_of(again)
    assert [int(row["step"]) for row in rows] == list(range(steps))
    assert [int(row["version"]) for row in rows] == list(range(1, steps + 1))
    assert "agreement" not in failed_checks(rows)


@pytest.mark.engine
def test_the_exported_model_loads_in_the_engine(first_run: Any, no_engine: EngineShelf) -> None:
    first_run.engine.shutdown()  # the last test that needs it: one engine at a time
    folder = first_run.folder.path / "model"
    with start_engine(folder, max_model_len=64) as engine:
        completion = engine.generate(prompt_token_ids=[2, 7, 14, 8, 17, 3], use_tqdm=False)
    assert completion.outputs[0].routed_experts.shape[1:] == (2, 2)


def test_resuming_with_another_seed_is_refused(tmp_path: Path) -> None:
    from settings import InputError, load_settings

    (tmp_path / "config.yaml").write_text((GRPO / "config" / "train.yaml").read_text())
    with pytest.raises(InputError, match="resume=true goes on with seed=0; it cannot be changed to 1"):
        load_settings([f"out={tmp_path}", "resume=true", "seed=1"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nonsense=1"], "nonsense"),
        (["engine.num_replicas=0"], "engine.num_replicas=0 must be a positive whole number"),
        (["train.sync_every=0"], "train.sync_every=0 must be a positive whole number"),
        (["rollout.answers=100"], "rollout.answers=100 is not a multiple of rollout.group_size=8"),
        (["model.path=./no/such/folder"], "model.path=./no/such/folder: there is no model in that folder"),
        (["replay=R4"], "replay=R4 must be R3, R2 or none"),
        (["control=chaos"], "control=chaos must be one of"),
        (["model.num_experts_per_tok=33"], "model.num_experts_per_tok=33 must be in 1..32"),
        (["resume=true", "out=./no/such/run"], "there is no run in ./no/such/run"),
        (["rollout.temperature=hot"], "rollout.temperature=hot must be a number"),
        (["train.lr=abc"], "train.lr=abc must be a number"),
        (["warmup.mistake=typo"], "warmup.mistake=typo must be one of random, forget_carry"),
        (["warmup.batch_size=0"], "warmup.batch_size=0 must be a positive whole number"),
        (["train.clip=0.2"], "train.clip=0.2 must be 2 numbers"),
        (["model.path=3"], "model.path=3 must be text"),
        (["out=null"], "out=None must be text"),
        (["task.operation=halve"], "task.operation=halve must be one of sum, double"),
        (["train.dtype=float16"], "train.dtype=float16 must be one of float32, bfloat16"),
        (["task.held_out=10000"], "task.held_out=10000 leaves none of 10000 to train"),
        (["task.operation=sum", "task.digits=1", "task.held_out=100"], "task.held_out=100 leaves none of 100 to train"),
        (["rollout.max_new_tokens=100"], "rollout.max_new_tokens must be at most 55"),
        (["task.operation=sum", "task.digits=1", "task.held_out=9", "rollout.max_new_tokens=59"], "at most 58"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from train import main

    assert main(overrides) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_a_missing_model_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from train import main

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # the variable is read at import
    assert main(["model.path=no/such-model", f"out={tmp_path / 'run'}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("train.py: model.path=no/such-model: ")
    assert not (tmp_path / "run").exists()


def test_a_dense_model_cannot_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from train import main

    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    path = save_tiny_moe(tmp_path / "dense", "qwen3")
    assert main([f"model.path={path}", f"out={tmp_path / 'run'}"]) == 2
    assert "dense model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_help_prints_every_knob(capsys: pytest.CaptureFixture[str]) -> None:
    from train import main

    assert main(["--help"]) == 0
    assert "group_size: 8" in capsys.readouterr().out
