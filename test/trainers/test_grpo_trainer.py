"""Training runs on real vLLM: what healthy ones show, that faults show, and that nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import logging
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch, TempPathFactory
from tensordict import set_list_to_stack
from torchrl.checkpoint import Checkpoint
from torchrl.trainers import LogScalar
from transformers import AutoModelForCausalLM, Qwen3Config

from support.engines import EngineShelf
from support.interrupts import interrupts
from support.processes import exit_code_of, process_of
from support.shared_training import changed
from support.training import (
    DLOGP_BOUND,
    LAYOUT,
    STEPS,
    failed_checks,
    fake_config,
    fake_fleet,
    fake_model,
    fake_run,
    numbers,
    rows_of,
    short,
    versions,
)
from support.waiting import PATIENCE, until
from torchrl_moe._compat_transformers import lowered
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.errors import CollectionError, EngineError, UnsupportedRouterError
from torchrl_moe.modules.policies.unstack import checkpoint_tensors, model_metadata
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.testing.fake_engine import shift_routes, wrong_ids
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.trainers import ConfigError, MoEGRPOTrainer, samples
from torchrl_moe.trainers.grpo_trainer import finishing

Make = Callable[..., MoEGRPOTrainer]


@pytest.fixture(scope="module", autouse=True)
def as_in_a_run() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with set_list_to_stack(True):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def first_run(shelf: EngineShelf, tmp_path_factory: TempPathFactory) -> Iterator[MoEGRPOTrainer]:
    """A finished short run; its engine serves the runs after it."""
    shelf.clear()
    trainer = MoEGRPOTrainer(config=short(tmp_path_factory.mktemp("run")))
    try:
        trainer.train()
        trainer.save_pretrained()
        yield trainer
    finally:
        trainer.shutdown()


@pytest.fixture
def run(first_run: MoEGRPOTrainer, tmp_path: Path) -> Iterator[Make]:
    """Makes a run of a trained model, on the first run's engine."""
    made = []

    def make(*overrides: str, **given: Any) -> MoEGRPOTrainer:
        few = (f"model.source={first_run.record.folder / 'model'}", "eval.every=0", "rollout.prompts_per_step=2")
        config = short(tmp_path, *few, *overrides)
        made.append(MoEGRPOTrainer(config=config, engine=first_run.rollout_engine.engine, **given))
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown()


@pytest.mark.engine
def test_a_short_run_passes_every_check(first_run: MoEGRPOTrainer, capsys: CaptureFixture[str]) -> None:
    folder = first_run.record.folder
    rows = rows_of(folder)
    assert failed_checks(rows) == set() and [int(row["step"]) for row in rows] == list(range(STEPS))
    assert next(name for name in rows[0] if "reward" in name) == "reward"
    assert [bool(row["held_out_reward"]) for row in rows] == [i in (0, 8, 15) for i in range(STEPS)]
    names = {path.name for path in folder.iterdir()}
    assert {"metrics.csv", "config.yaml", "versions.json", "samples.jsonl", "checkpoints", "model"} <= names
    assert list(folder.rglob("events.out.tfevents*")) and numbers(rows, "staleness") == [0.0] * STEPS
    tokens = [length * 64 for length in numbers(rows, "length")]
    assert numbers(rows, "trained_tokens")[-1] == pytest.approx(sum(tokens))
    exported = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).state_dict()
    trained = first_run.policy_model.model.state_dict()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    # what it shows
    assert repr(first_run).startswith("MoEGRPOTrainer(Qwen3MoeForCausalLM, GRPOLoss, replay='R3', step 16 of 16")
    assert ">reward</td>" in first_run._repr_html_()
    first_run.show_samples(2)
    assert "+" in capsys.readouterr().out and len(first_run.to_pandas()) == STEPS
    assert {axes.get_title() for axes in first_run.plot().axes} != set() and first_run.summary().row_count >= 8
    lines = [json.loads(line) for line in (first_run.record.folder / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * STEPS and lines[0]["prompt"].endswith("=")


@pytest.mark.engine
@pytest.mark.parametrize("fault", [shift_routes, pytest.param(wrong_ids, marks=pytest.mark.soak)])
def test_a_fault_on_purpose_is_noticed(run: Make, fault: Any) -> None:
    trainer = run("steps=1", f"hooks=[torchrl_moe.testing.fake_engine:{fault.__name__}]", "eval.max_mismatch=null")
    trainer.train()
    rows = rows_of(trainer.record.folder)
    assert "agreement" in failed_checks(rows)
    assert max(numbers(rows, "dlogp_live")) <= DLOGP_BOUND  # the live router follows no record


@pytest.mark.engine
@pytest.mark.soak
def test_advantages_of_other_answers_teach_nothing(first_run: MoEGRPOTrainer, tmp_path: Path) -> None:
    config = short(tmp_path, "hooks=[torchrl_moe.testing.fake_engine:shuffle_advantages]")
    with MoEGRPOTrainer(config=config, engine=first_run.rollout_engine.engine) as trainer:
        trainer.train()
    assert "learning" in failed_checks(rows_of(tmp_path))


@pytest.mark.engine
@pytest.mark.parametrize("replay", ["R2", pytest.param("none", marks=pytest.mark.soak)])
def test_other_ways_to_route(run: Make, replay: str) -> None:
    trainer = run("steps=1", f"loss.replay={replay}")
    trainer.train()
    assert max(numbers(rows_of(trainer.record.folder), "dlogp_max")) <= DLOGP_BOUND


@pytest.mark.engine
def test_generation_continues_while_the_trainer_trains(run: Make) -> None:
    """Each sync asks the engine for log-probs of a fixed prompt and compares them with the model's."""
    trainer = run(
        "steps=4", "rollout.max_staleness=2", "engine.sync.verify=canary", "optim.epochs=2", "optim.minibatches=2",
        "optim.max_tokens=80", "loss.arguments.proximal_policy=recomputed", "loss.arguments.correction=tis",
    )  # fmt: skip
    reports = []
    sync = trainer.rollout_engine.sync
    trainer.rollout_engine.sync = lambda: reports.append(sync()) or reports[-1]  # type: ignore[method-assign, func-returns-value]
    trainer.train()
    rows = rows_of(trainer.record.folder)
    assert versions(rows) == list(range(1, 5))
    assert all(not report.failed for report in reports) and len(reports) == 4
    assert 0 < max(numbers(rows, "staleness")) <= 3 and trainer.learner.stepper.schedule.last_epoch == 4 * 2 * 2


@pytest.mark.engine
def test_an_adapter_is_trained_and_exported_as_part_of_the_weights(run: Make) -> None:
    trainer = run(
        "steps=2", "model.lora.rank=4", "model.lora.target=all", "optim.lr=1e-2",
        "loss.arguments.kl_to_ref_coeff=0.01", "model.activation_checkpointing=true",
    )  # fmt: skip
    names = list(trainer.policy_model.trained)
    assert names and all("lora_" in name for name in names)
    trainer.train()
    rows = rows_of(trainer.record.folder)
    assert max(numbers(rows, "dlogp_max")) <= DLOGP_BOUND  # the engine has the sum of base and adapter
    ids = torch.tensor([[2, 7, 14, 8, 17, 3]])
    exported = AutoModelForCausalLM.from_pretrained(trainer.save_pretrained(), dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, trainer.policy_model.model(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.engine
def test_a_replica_that_is_killed_costs_nothing(run: Make) -> None:
    trainer = run("steps=2")
    entry = trainer.rollout_engine.engine.replica_table[0]
    first = process_of(entry.replica)

    def kill() -> None:
        if trainer.steps_done == 1:
            first.kill()

    trainer.register_op("post_steps", kill)
    trainer.train()
    rows = rows_of(trainer.record.folder)
    assert [int(row["step"]) for row in rows] == [0, 1] and "agreement" not in failed_checks(rows)
    assert process_of(entry.replica) != first


# -- on a fake engine -------------------------------------------------------------------------------------------------
@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet() as service:
        yield service


@pytest.fixture
def start(fleet: FakeFleet, tmp_path: Path) -> Make:
    """Begins a run of so many steps, with other settings by their dotted names."""

    def begin(steps: int, settings: Mapping[str, Any] | None = None, **given: Any) -> MoEGRPOTrainer:
        return fake_run(fleet, changed(fake_config(tmp_path, steps), settings or {}), **given)

    return begin


@pytest.fixture
def trained(start: Make) -> Make:
    """Makes such a run to its end."""

    def run(*arguments: Any, **given: Any) -> MoEGRPOTrainer:
        with start(*arguments, **given) as trainer:
            trainer.train()
        return trainer

    return run


@pytest.mark.parametrize(
    ("every", "sync_every", "scores", "column"),
    [
        (2, 1, [-1e300, 2.0, -1e300, 4.0, -1e300, 6.0], [0.0, "", 2.0, "", 4.0, 6.0]),
        (1, 2, [-1e300, 2.0, -1e300, 4.0, 5.0], None),  # weights that the engine has not got are not evaluated
    ],
)
def test_a_checkpoint_is_scored_by_its_own_weights_and_a_row_has_the_evaluation_before_it(
    start: Make, monkeypatch: MonkeyPatch, every: int, sync_every: int, scores: Any, column: Any
) -> None:
    settings = {"eval.every": every, "engine.sync_every": sync_every, "checkpoint.every": 1, "checkpoint.keep": 9}
    with start(len(scores), settings, held_out=[{"prompt": "1+1="}]) as trainer:
        monkeypatch.setattr(trainer, "evaluate", lambda: float(trainer.steps_done))
        trainer.train()
        paths = trainer.checkpoints.rotation.checkpoints()
        assert [Checkpoint.manifest(path)["metadata"]["score"] for path in paths] == scores
    assert column is None or [row["held_out_reward"] for row in trainer.record.rows] == column


def test_a_resumed_run_has_the_learning_rate_that_is_asked_for_and_a_new_seed(trained: Make, fleet: FakeFleet) -> None:
    settings = {"optim.schedule": "linear", "optim.lr": 4e-4, "checkpoint.every": 1}
    assert trained(2, settings).record.column("lr") == pytest.approx([4e-4, 2e-4])
    before = {replica.seed for replica in fleet.fakes}
    again = trained(4, {**settings, "resume": True, "optim.lr": 8e-4, "optim.weight_decay": 0.5})
    (group,) = again.learner.optimizer.param_groups
    assert (group["weight_decay"], group["initial_lr"]) == (0.5, 8e-4)
    assert again.record.column("lr") == pytest.approx([4e-4, 2e-4, 4e-4, 2e-4])  # 8e-4 * (1 - 2 / 4), ...
    after = [replica.seed for replica in fleet.fakes]
    assert len({*before, *after}) == len(before) + len(after)


def test_updates_that_the_engine_lacks_count_as_age_and_the_last_one_reaches_it(
    trained: Make, fleet: FakeFleet
) -> None:
    trainer = trained(5, {"engine.sync_every": 3})
    assert torch.equal(fleet.fakes[0].weights["lm_head.weight"], trainer.policy_model.model.lm_head.weight)
    assert trainer.record.column("staleness") == [0.0, 1.0, 2.0, 0.0, 1.0]
    found = trainer.record.column("version")
    assert [version - found[0] for version in found] == [0, 0, 1, 1, 2]


def test_weights_that_the_engine_lacks_have_a_version_of_their_own_in_a_checkpoint(start: Make) -> None:
    """A resumed run gives them to the engine at once."""
    with start(5, {"engine.sync_every": 2}) as trainer:
        for lacks in (0, 1, 0):
            assert trainer.state_dict()["version"] == trainer.rollout_engine.version + lacks
            trainer.step()


def test_after_a_ctrl_c_another_trainer_continues(start: Make, trained: Make, fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.generate("hi", {"max_tokens": 1}, use_tqdm=False)  # starts its thread, which stays
    before = {"tqdm_monitor", *(thread.name for thread in threading.enumerate())}
    with interrupts() as interrupt, start(3, {"checkpoint.every": 1}) as trainer:
        interrupt(lambda: trainer.steps_done)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert 1 <= trainer.steps_done < 3
        with pytest.raises(RuntimeError, match=r"interrupted: continue with another trainer and config.resume=True"):
            trainer.train()
    until(lambda: {thread.name for thread in threading.enumerate()} <= before)
    assert fleet.states == ["SERVING"] * len(fleet.states)
    assert fleet.get_num_unfinished_requests() == [0] * len(fleet.states)
    fleet.generate("hi", {"max_tokens": 1}, use_tqdm=False)
    assert trained(3, {"checkpoint.every": 1, "resume": True}).steps_done == 3
    assert [int(row["step"]) for row in rows_of(tmp_path)] == [0, 1, 2]


def test_a_resumed_run_is_not_rated_against_a_model_that_was_trained_meanwhile(trained: Make) -> None:
    settings = {"checkpoint.every": 1, "loss.arguments": {"kl_to_ref_coeff": 0.1}}
    model = fake_model()
    trained(1, settings, model=model)
    with pytest.raises(ConfigError, match=r"the KL reference would be of its trained weights. Load the model again"):
        trained(2, {**settings, "resume": True}, model=model)
    assert trained(2, {**settings, "resume": True}, model=fake_model()).steps_done == 2


def names_of(frame: FrameType | None) -> list[str]:
    """The functions of samples.py that a frame is in."""
    frames = [one.f_code for one, _ in traceback.walk_stack(frame)]
    return [code.co_name for code in frames if code.co_filename == samples.__file__]


@pytest.mark.parametrize("comes", ["in the step", "while it waits"])
def test_a_ctrl_c_leaves_a_checkpoint_of_the_running_step_and_waits_for_no_evaluation(
    comes: str, start: Make, monkeypatch: MonkeyPatch
) -> None:
    over, evaluated = threading.Event(), []

    def evaluate() -> float:
        evaluated.append(trainer.steps_done)
        if trainer.steps_done == 1:  # it runs beside the step of the signal
            if comes == "while it waits":
                until(lambda: "wait" in names_of(sys._current_frames()[threading.main_thread().ident]))  # type: ignore[index]
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            assert over.wait(60)
        return 1.0

    with start(6, {"checkpoint.every": 100, "eval.every": 1}, held_out=[{"prompt": "1+1="}]) as trainer:
        monkeypatch.setattr(trainer, "evaluate", evaluate)
        if comes == "in the step":
            trainer.register_op("batch_process", lambda batch: trainer.steps_done == 1 and signal.raise_signal(2))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert trainer.steps_done == 2 and evaluated == [0, 1] and not over.is_set()
    over.set()
    with start(6, {"resume": True}) as again:
        assert again.steps_done == 2


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_is_not_replaced_before_the_first_step_of_another(start: Make, trained: Make, tmp_path: Path) -> None:
    trained(2, {"checkpoint.every": 1})
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"holds a run \(2 step\(s\).*\): set resume=True"):
        start(2)
    replacing = {"checkpoint.every": 1, "overwrite": True}
    with start(2, replacing) as second:
        assert contents(tmp_path) == before
        second.register_op("post_steps", lambda: before != contents(tmp_path) and pytest.fail("the older run is gone"))
        second.register_op("post_steps", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            second.train()
    assert contents(tmp_path) == before
    trained(1, replacing)
    assert len(rows_of(tmp_path)) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000000001"]


def test_without_a_terminal_each_step_is_a_line(trained: Make, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    trained(5, {"log.progress": True, "log.print_every": 2})
    first, *steps, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"GRPO in {tmp_path}: steps 0 to 5 of 2 prompts with 2 answers each")
    assert [line.split(":")[0] for line in steps] == ["step 1 of 5", "step 3 of 5", "step 5 of 5"]
    assert all("reward " in line and ", tokens/s " in line for line in steps)
    assert "left" in steps[0] and str(tmp_path) in last


class Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_and_figures_that_fail_do_not_end_a_run(
    trained: Make, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    monkeypatch.setattr(MoEGRPOTrainer, "plot", lambda _: (_ for _ in ()).throw(ValueError("arange")))
    with Full() as full, redirect_stdout(full):
        assert trained(2, {"log.progress": True, "log.plot_every": 1}).steps_done == 2
    assert "a line of progress was not printed" in caplog.text
    assert "no figure of step 1: ValueError('arange')" in caplog.text


def test_invalid_arguments_are_refused_before_anything_is_written(start: Make, tmp_path: Path) -> None:
    dense = make_tiny_moe("qwen3", num_hidden_layers=1)
    no_callbacks = r"has no callbacks: here it is config\.hooks, or register_op"
    for kind, message, given in (
        (TypeError, no_callbacks, {"callbacks": []}),  # as other trainers call it
        (TypeError, r"train_dataset is another name of dataset: give one of them", {"train_dataset": []}),
        (TypeError, r"has no reward: did you mean rewards\?", {"reward": len}),
        (ConfigError, r"model\.source=no/such/folder: there is no model", {"model": "no/such/folder"}),
        (UnsupportedRouterError, r"it is a dense model, .* set loss\.replay=none", {"model": dense}),
        (ConfigError, r"all of its weights are frozen .* nothing to train", {"model": frozen("")}),
    ):
        with pytest.raises(kind, match=message):
            start(1, **given)
    with pytest.raises(ConfigError, match=r"plan=True: a trainer starts a run.*RunPlan\.of"):
        MoEGRPOTrainer(config={"plan": True})
    with pytest.raises(ConfigError, match=r"config must be a GRPOConfig or a dict .*compose\.load_config"):
        MoEGRPOTrainer(config="mine.yaml")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


class Calls:
    """A hook with a state, as TorchRL's are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def register(self, trainer: Any, name: str = "calls") -> None:
        trainer.register_module(name, self)
        trainer.register_op("post_optim", self)


def test_after_a_signal_the_engine_sleeps_at_once(start: Make, monkeypatch: MonkeyPatch) -> None:
    over, modes = threading.Event(), []

    def evaluate() -> float:
        if trainer.steps_done == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            assert over.wait(60)
        return 1.0

    settings = {"checkpoint.every": 100, "eval.every": 1, "engine.sleep": True}
    with start(6, settings, held_out=[{"prompt": "1+1="}]) as trainer:
        monkeypatch.setattr(trainer, "evaluate", evaluate)
        monkeypatch.setattr(trainer.rollout_engine.engine, "sleep", lambda mode: modes.append(mode))
        monkeypatch.setattr(trainer.rollout_engine.engine, "wake_up", lambda: None)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert (modes, trainer.steps_done) == (["wait", "keep"], 2)
        over.set()


def test_hooks_log_by_step_get_the_means_of_updates_and_keep_their_state(start: Make) -> None:
    """TorchRL's and one's own, over two runs: the number of optimizer steps goes on where the first has ended."""
    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[tuple[int, float]] = []
    phases: list[list[str]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append((step, dict(metrics))))
    for steps, resume in ((1, False), (2, True)):
        calls = Calls()
        with start(steps, {"resume": resume, "checkpoint.every": 1, "optim.minibatches": 2}) as trainer:
            calls.register(trainer)
            assert calls.count == (2 if resume else 0)
            with pytest.raises(ValueError, match="there is a module of the name calls already"):
                trainer.register_module("calls", calls)
            for place in ("post_loss", "process_loss", "optimizer"):
                with pytest.raises(ValueError, match=f"'{place}'.*'process_optim_batch' .* or 'post_optim'"):
                    trainer.register_op(place, calls)
            with pytest.raises(ValueError, match="there is no stage 'post_step' for a hook: did you mean post_steps"):
                trainer.register_op("post_step", calls)
            step, numbers = trainer.learner.stepper.step, count(1)

            def numbered(batch: Any, step: Any = step, numbers: Any = numbers) -> Any:
                """An update whose loss is its number."""
                return {**step(batch), "loss_objective": torch.tensor(float(next(numbers)))}

            trainer.learner.stepper.step = numbered  # type: ignore[method-assign]
            LogScalar(("advantage",), "mean_advantage").register(trainer)
            trainer.register_op(
                "post_optim_complete_log", lambda count, losses: ended.append((count, float(losses["loss_objective"])))
            )
            trainer.register_op("post_steps_log", lambda batch: {"rows": np.float32(len(batch)), "is_switch": True})
            clock = trainer.clock
            trainer.hooks.add("post_steps", lambda clock=clock: phases.append([*clock.seconds]))
            trainer.record.loggers = [logger]  # type: ignore[list-item]
            trainer.train()
            assert calls.count == trainer._optim_count == 2 * steps
    assert phases == [["generate", "score", "train", "sync"]] * 2
    assert ended == [(2, 1.5), (4, 1.5)]  # of the updates 1 and 2
    assert [one for one in logged if "rows" in one[1]] == [(0, {"rows": 4.0}), (1, {"rows": 4.0})]
    assert [step for step, metrics in logged if "mean_advantage" in metrics] == [0, 1]


def test_trls_quick_start_runs_as_it_is(fleet: FakeFleet, tmp_path: Path) -> None:
    def reward_unique(completions: list[str], kind: list[str], **kwargs: Any) -> list[float]:
        assert kind == ["a"] and kwargs["prompts"]
        return [float(len(set(completion))) for completion in completions]

    rows = [{"prompt": f"{i}+1=", "kind": "a"} for i in range(8)]
    theirs = {"reward_funcs": reward_unique, "train_dataset": rows, "processing_class": ByteTokenizer()}
    with MoEGRPOTrainer(model=fake_model(), config=fake_config(tmp_path, 1), engine=fleet, **theirs) as trainer:
        trainer.train()
        assert trainer.record.rows[0]["reward"] > 0


def test_the_seed_is_pythons_and_numpys_too(start: Make, tmp_path: Path) -> None:
    drawn = []
    for folder in ("one", "two"):
        with start(1, {"seed": 5, "out": str(tmp_path / folder)}):
            drawn.append((random.random(), np.random.random()))
    assert drawn[0] == drawn[1]


def test_steps_may_be_made_one_by_one_until_the_run_has_ended(
    start: Make, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(_: object) -> Iterator[Any]:
        monkeypatch.undo()
        raise KeyboardInterrupt
        yield

    ended = r"has ended, was shut down or interrupted: .* config\.resume=True"
    with start(2, {"checkpoint.every": 0}) as trainer:
        before = trainer.rollout_engine.version
        monkeypatch.setattr(AsyncLLMCollector, "__iter__", interrupted)
        with pytest.raises(KeyboardInterrupt):  # while it waits: the step may be made again
            trainer.step()
        assert [trainer.step() for _ in range(4)] == [True, True, False, False]
        assert [row["step"] for row in trainer.record.rows] == [0, 1]
        assert trainer.rollout_engine.version == before + 2
        trainer.config.steps = 3
        trainer.train()  # it has stopped: no step more
        with pytest.raises(RuntimeError, match=ended):
            trainer.train()
        assert trainer.steps_done == 2
    with pytest.raises(RuntimeError, match=ended):
        trainer.step()
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_the_first_failure_is_in_the_row_and_in_a_notebook_as_it_is(trained: Make) -> None:
    calls = itertools.count()

    def reward(completion_ids: list[int]) -> float:
        if not next(calls):
            raise ValueError("no number in <it>")
        return float(completion_ids[0] % 7)

    trainer = trained(1, {"rollout.max_failures": 8}, rewards=reward)
    (row,) = trainer.record.rows
    assert row["failures"] >= 1 and "no number in <it>" in row["first_failure"]
    line = reward.__code__.co_firstlineno + 2
    assert row["first_failure"].endswith(f"in the reward function 'reward' (test_grpo_trainer.py:{line})")
    assert "no number in &lt;it&gt;" in trainer._repr_html_()


def test_under_r2_the_reference_follows_the_experts_that_the_policy_has_recorded(start: Make, tmp_path: Path) -> None:
    arguments = {"kl_to_ref_coeff": 0.1, "proximal_policy": "recomputed"}
    seen = []
    with start(1, {"loss.replay": "R2", "loss.arguments": arguments, "eval.mismatch_every": 1}) as trainer:
        trainer.register_op("batch_process", seen.append)
        trainer.train()
    for row in seen[0].unbind(0):  # still the same weights
        known = row["masks", "all_assistant_mask"]
        torch.testing.assert_close(row["ref_log_probs", "full"][known], row["prox", "full"][known])
    (row,) = rows_of(tmp_path)
    assert row["kl_to_ref"] and row["mismatch_kl"] and row["skipped_steps"] == "0.0"  # both divergences have a column


@pytest.mark.parametrize("kind", ["waits", "blocks"])
def test_a_held_out_reward_that_hangs_costs_its_evaluation(trained: Make, caplog: LogCaptureFixture, kind: str) -> None:
    released = threading.Event()

    async def waits(prompt: str) -> float:
        return float(prompt != "held out" or await asyncio.Event().wait())

    def blocks(prompt: str) -> float:
        return float(prompt != "held out" or released.wait(60))

    rewards: Any = waits if kind == "waits" else blocks
    settings = {"eval.every": 1, "rollout.reward_timeout": 3.0}
    try:
        trainer = trained(1, settings, rewards=rewards, held_out=[{"prompt": "held out"}])
        assert not released.is_set()
    finally:
        released.set()
    assert trainer.record.column("held_out_reward") == []
    assert caplog.text.count("no evaluation at step") == 2 and "within 3 s" in caplog.text


def test_an_engine_that_disagrees_in_float32_ends_the_run(
    start: Make, fleet: FakeFleet, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    """The fake's log-probs are its own, and so is what it says that it computes in."""
    words = r"disagree .* float32: mismatch_kl=.* The first such token: id \d+ at place \d+ of row 0, .*mismatch=null"
    for dtype, limit in (("float32", 0.01), ("bfloat16", 0.01), ("float32", None)):
        fleet.infos[:] = [replace(info, dtype=dtype) for info in fleet.infos]
        settings = {"eval.mismatch_every": 1, "eval.max_mismatch": limit, "out": str(tmp_path / f"{dtype} {limit}")}
        with start(1, settings) as trainer:
            if (dtype, limit) == ("float32", 0.01):
                with pytest.raises(EngineError, match=words):
                    trainer.train()
            else:
                trainer.train()
    assert caplog.text.count("far apart") == 3


# -- models as users bring them ---------------------------------------------------------------------------------------
def frozen(*parts: str, trains: bool = False, **config: Any) -> Any:
    """The tiny model without a gradient where a name has one of these parts, or with one only there."""
    model = fake_model(**config)
    for name, weight in model.named_parameters():
        weight.requires_grad_(any(part in name for part in parts) is trains)
    return model


def bf16(model: Any) -> Any:
    return lowered(model, torch.bfloat16)


def adapted(**arguments: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj"], **arguments)
    return get_peft_model(bf16(fake_model()), lora)


def without_experts() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": fake_model().config.vocab_size}
    return AutoModelForCausalLM.from_config(Qwen3Config(**sizes))


STATES: dict[str, Callable[[], Any]] = {
    "plain": fake_model,
    "bf16": lambda: bf16(fake_model()),
    "frozen routers": lambda: frozen("mlp.gate.weight"),
    "frozen routers, bf16": lambda: bf16(frozen("mlp.gate.weight")),
    "only the head, bf16": lambda: bf16(frozen("lm_head", trains=True)),
    "only the experts, bf16": lambda: bf16(frozen("experts", trains=True)),
    "only norms, bf16": lambda: bf16(frozen("norm", trains=True)),
    "tied": lambda: fake_model(tie_word_embeddings=True),
    "tied, frozen experts, bf16": lambda: bf16(frozen("experts", tie_word_embeddings=True)),
    "adapter, bf16": adapted,
    "adapter on experts, bf16": lambda: adapted(target_parameters=["mlp.experts.down_proj"]),
    "adapter and whole norms, bf16": lambda: adapted(modules_to_save=["norm"]),
    "compiled": lambda: torch.compile(fake_model(), backend="eager"),
    "dense, bf16": lambda: bf16(without_experts()),
}
ALWAYS = (
    ("only the head, bf16", "bfloat16"),
    ("tied, frozen experts, bf16", "float32"),
    ("adapter and whole norms, bf16", "float32"),
    ("dense, bf16", "float32"),
)
WIDE = [*((state, "float32") for state in STATES), ("frozen routers, bf16", "bfloat16")]
WIDE += [("adapter on experts, bf16", "bfloat16")]


@pytest.mark.parametrize(
    ("state", "dtype"),
    [*ALWAYS, *(pytest.param(*pair, marks=pytest.mark.parity) for pair in WIDE if pair not in ALWAYS)],
)
def test_a_model_of_any_state_is_scored_trained_synced_and_saved(tmp_path: Path, state: str, dtype: str) -> None:
    torch.manual_seed(0)
    model, number = STATES[state](), count()
    replay = "none" if state.startswith("dense") else "R3"
    settings = {"eval.mismatch_every": 1, "optim.lr": 1e-2, "optim.max_tokens": 40, "model.dtype": dtype}
    config = changed(fake_config(tmp_path, 1), {**settings, "save.dtype": "float32", "loss.replay": replay})
    before = {name: weight.detach().float().clone() for name, weight in model.named_parameters()}
    layout = None if replay == "none" else LAYOUT
    given: dict[str, Any] = {"model": model, "rewards": lambda completion: float(next(number))}
    with (
        FakeFleet(1, expected=model_metadata(model), layout=layout) as fleet,
        fake_run(fleet, config, dataset=[{"prompt": "1+1="}], **given) as trainer,
    ):
        trainer.train()
        (row,) = trainer.record.rows
        assert row["grad_norm"] > 0 and row["dlogp_mean"] > 0
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        moved = {name for name, weight in model.named_parameters() if not torch.equal(weight.float(), before[name])}
        assert moved and moved <= trained
        saved = AutoModelForCausalLM.from_pretrained(trainer.save_pretrained(), dtype=torch.float32)
        ids = torch.tensor([[2, 7, 14, 8, 17, 3]])
        with torch.no_grad():
            bound = 1e-5 if all(weight.dtype == torch.float32 for weight in model.parameters()) else 0.1
            torch.testing.assert_close(saved(ids).logits, model(ids).logits.float(), atol=bound, rtol=bound)
        sent, kept = fleet.fakes[0].weights, dict(checkpoint_tensors(saved))
        assert sent.keys() == kept.keys()
        for name, tensor in sent.items():
            torch.testing.assert_close(tensor.float(), kept[name], atol=1e-2, rtol=1e-2)


# -- what users bring -------------------------------------------------------------------------------------------------
def prompts_of_a_run(tmp_path: Path, rows: list[dict[str, Any]], template: str | None, **options: Any) -> set[str]:
    """The prompts that an engine gets in a run of one step, as text."""
    seen: set[str] = set()
    tokenizer, config = ByteTokenizer(), fake_config(tmp_path, 1)
    tokenizer.chat_template, config.chat_template_kwargs = template, options
    with (
        fake_fleet(1, script=lambda prompt: seen.add(prompt)) as fleet,
        fake_run(fleet, config, dataset=rows, tokenizer=tokenizer) as trainer,
    ):
        trainer.train()
    return seen


def test_a_template_gets_what_the_run_and_the_row_have_for_it(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    assert prompts_of_a_run(tmp_path / "none", [{"prompt": "Q: 1+1= A:"}], None) == {"Q: 1+1= A:"}
    assert "no chat template" in caplog.text
    template = "{{ [messages[-1], tools, thinking, add_generation_prompt] | tojson }}"
    asked = {"role": "user", "content": "a", "name": "Ada"}
    goes_on = {"role": "assistant", "content": "Let me"}  # which the answer continues
    rows: list[dict[str, Any]] = [
        {"prompt": [asked], "tools": [{"name": "f"}]},
        {"prompt": "b", "chat_template_kwargs": {"thinking": True}},
    ]
    assert sorted(map(json.loads, prompts_of_a_run(tmp_path, rows, template, thinking=False)), key=str) == [
        [asked, [{"name": "f"}], False, True],
        [{"role": "user", "content": "b"}, None, True, True],
    ]
    seen = prompts_of_a_run(tmp_path / "on", [{"prompt": [asked, goes_on]}], ByteTokenizer().chat_template)
    assert seen == {"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nLet me"}


def test_a_reward_that_sets_signals_ends_the_run_with_what_to_do(start: Make) -> None:
    def judge(completion: str) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    with start(3, rewards=judge) as trainer:
        with pytest.raises(CollectionError, match=r"switch that timeout off.*parsing_timeout=None.*in a process"):
            trainer.train()
        assert trainer.collector.stats()["collector/failures"] == 0


# -- signals, forks and hooks -----------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """As in a shell; one that starts in the background ignores Ctrl-C."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "seconds", "expected"),
    [(1, 60, ["asked", "finished"]), (2, 60, ["asked"]), (1, 0.01, ["asked"]), (1, 0, [])],
)
def test_a_step_may_finish_until_a_second_signal_or_its_deadline(
    signals: int, seconds: float, expected: list[str]
) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), finishing(lambda: done.append("asked"), lambda: done.append("-"), seconds):
        assert (signal.getsignal(signal.SIGINT) is signal.default_int_handler) == (seconds == 0)
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)
        if seconds < 1:
            time.sleep(PATIENCE)  # which the signal ends
        done.append("finished")
    assert done == expected and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_users_own_handler_stays() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    with finishing(lambda: heard.append(0), lambda: heard.append(0), 60):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_from_outside_has_its_exit_code(name: str, tmp_path: Path) -> None:
    number, said = signal.Signals[name], tmp_path / "said"

    def run() -> None:
        signal.signal(number, signal.SIG_DFL)
        out = said.open("a", buffering=1)
        logging.getLogger().addHandler(logging.StreamHandler(out))
        with finishing(lambda: None, lambda: print("ended", file=out), 60):
            signal.raise_signal(number)
            print("finished", file=out)
        print("not reached", file=out)

    assert exit_code_of(run) == -number
    told, *rest = said.read_text().splitlines()
    assert f"{name}: the running step is finished and saved" in told and rest == ["finished", "ended"]


def test_a_forked_process_shuts_nothing_down_and_does_not_wait(start: Make, monkeypatch: MonkeyPatch) -> None:
    with start(2, {"checkpoint.every": 1}) as trainer:
        is_written = threading.Event()
        monkeypatch.setattr(trainer.checkpoints, "_publish", lambda *_: is_written.wait(PATIENCE))
        trainer.checkpoints.save(0, 0.0)  # its thread is not there in the forked process
        assert exit_code_of(trainer.shutdown, PATIENCE) == 0
        is_written.set()
        trainer.train()
        assert trainer.steps_done == 2


@pytest.mark.parametrize("place", ["post_steps", "post_optim"])
def test_a_checkpoint_in_a_hook_leaves_the_steps_seconds(start: Make, tmp_path: Path, place: str) -> None:
    began, slept = time.perf_counter(), 0.05 if place == "post_optim" else 0.0
    with start(2, {"checkpoint.every": 10}) as trainer:

        def hook(*_: object) -> None:
            time.sleep(slept)
            trainer.save_trainer(force_save=place != "post_optim")

        trainer.register_op(place, hook)
        trainer.train()
        assert trainer.steps_done == 2
    rows = rows_of(tmp_path)
    # what an optimizer step took is counted, and nothing is counted twice
    assert all(float(row["tokens_per_second"]) > 0 and float(row["seconds_train"]) >= slept for row in rows)
    counted = sum(float(value) for row in rows for name, value in row.items() if name.startswith("seconds_") and value)
    assert counted <= time.perf_counter() - began
