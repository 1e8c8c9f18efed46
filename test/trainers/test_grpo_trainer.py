"""Training runs on real vLLM: what healthy ones show, that faults show, and that nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import set_list_to_stack
from torchrl.checkpoint import Checkpoint

from support.engines import EngineShelf, start_engine
from support.interrupts import interrupts
from support.processes import process_of
from support.training import (
    DLOGP_BOUND,
    STEPS,
    failed_checks,
    fake_config,
    fake_fleet,
    fake_run,
    numbers,
    rows_of,
    short,
    versions,
)
from support.waiting import until
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.testing.faults import shift_routes, wrong_ids
from torchrl_moe.trainers import ConfigError, GRPOConfig, MoEGRPOTrainer
from torchrl_moe.trainers.checkpoints import Checkpoints
from torchrl_moe.trainers.script import main
from torchrl_moe.trainers.trained_state import TrainedState

Make = Callable[..., MoEGRPOTrainer]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with set_list_to_stack(True):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def first_run(shelf: EngineShelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MoEGRPOTrainer]:
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
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"config": {"steps": 3}}, r"config must be a GRPOConfig, got dict: GRPOConfig\(steps=3\), or load_config"),
        ({"train_dataset": []}, "has no argument train_dataset: pass dataset"),
        ({"reward": len}, "has no argument reward: pass rewards"),
        ({"xyz": 1}, "has no argument xyz: it takes model, dataset, .* all settings are in config"),
        ({"model": "no/such/folder"}, "model.source=no/such/folder: there is no model in that folder"),
    ],
)
def test_what_is_misspelt_is_refused_with_the_way_out(given: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=words):
        MoEGRPOTrainer(**given)


def test_a_short_run_passes_every_check_and_leaves_its_records(first_run: MoEGRPOTrainer) -> None:
    folder = first_run.record.folder
    rows = rows_of(folder)
    assert failed_checks(rows) == set()
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert next(name for name in rows[0] if "reward" in name) == "reward"
    assert [bool(row["held_out_reward"]) for row in rows] == [i in (0, 8, 15) for i in range(STEPS)]
    names = {path.name for path in folder.iterdir()}
    assert {"metrics.csv", "config.yaml", "versions.json", "samples.jsonl", "checkpoints", "model"} <= names
    assert list(folder.rglob("events.out.tfevents*"))
    assert numbers(rows, "staleness") == [0.0] * STEPS
    tokens = [length * 64 for length in numbers(rows, "length")]
    assert numbers(rows, "trained_tokens")[-1] == pytest.approx(sum(tokens))


@pytest.mark.engine
def test_it_shows_what_it_did(first_run: MoEGRPOTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert repr(first_run).startswith("MoEGRPOTrainer(Qwen3MoeForCausalLM, GRPOLoss, replay='R3', step 16 of 16")
    assert ">reward</td>" in first_run._repr_html_()
    first_run.show_samples(2)
    assert "+" in capsys.readouterr().out
    assert len(first_run.to_pandas()) == STEPS
    assert {axes.get_title() for axes in first_run.plot().axes} != set()
    assert first_run.summary().row_count >= 8
    lines = [json.loads(line) for line in (first_run.record.folder / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * STEPS
    assert lines[0]["prompt"].endswith("=")


@pytest.mark.engine
def test_the_exported_model_is_the_trained_one(first_run: MoEGRPOTrainer) -> None:
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(first_run.record.folder / "model", dtype=torch.float32).state_dict()
    trained = first_run.policy_model.model.state_dict()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


@pytest.mark.engine
@pytest.mark.parametrize("fault", [shift_routes, wrong_ids])
def test_a_fault_on_purpose_is_noticed(run: Make, fault: Any) -> None:
    trainer = run("steps=2", f"hooks=[torchrl_moe.testing.faults:{fault.__name__}]")
    trainer.train()
    rows = rows_of(trainer.record.folder)
    assert "agreement" in failed_checks(rows)
    assert max(numbers(rows, "dlogp_live")) <= DLOGP_BOUND  # the live router follows no record


@pytest.mark.engine
@pytest.mark.soak
def test_advantages_of_other_answers_teach_nothing(first_run: MoEGRPOTrainer, tmp_path: Path) -> None:
    config = short(tmp_path, "hooks=[torchrl_moe.testing.faults:shuffle_advantages]")
    with MoEGRPOTrainer(config=config, engine=first_run.rollout_engine.engine) as trainer:
        trainer.train()
    assert "learning" in failed_checks(rows_of(tmp_path))


@pytest.mark.engine
def test_the_engine_may_be_renewed_every_few_steps(run: Make) -> None:
    trainer = run("engine.sync_every=2", "steps=4")
    trainer.train()
    rows = rows_of(trainer.record.folder)
    assert versions(rows) == [1, 2, 2, 3]
    # every second rollout is of the weights before the last update
    assert [dlogp > DLOGP_BOUND for dlogp in numbers(rows, "dlogp_max")] == [False, True, False, True]


@pytest.mark.engine
def test_generation_continues_while_the_trainer_trains(run: Make) -> None:
    """Each sync asks the engine for log-probs of a fixed prompt and compares them with the model's."""
    trainer = run(
        "steps=8",
        "rollout.max_staleness=2",
        "engine.sync.verify=canary",
        "optim.epochs=2",
        "optim.minibatches=2",
        "optim.max_tokens=80",
        "loss.arguments.proximal_policy=recomputed",
        "loss.arguments.correction=tis",
    )
    reports = []
    sync = trainer.rollout_engine.sync
    trainer.rollout_engine.sync = lambda: reports.append(sync()) or reports[-1]  # type: ignore[method-assign, func-returns-value]
    trainer.train()
    rows = rows_of(trainer.record.folder)
    assert versions(rows) == list(range(1, 9))
    assert all(not report.failed for report in reports) and len(reports) == 8
    assert 0 < max(numbers(rows, "staleness")) <= 3
    assert trainer.learner.stepper.schedule.last_epoch == 8 * 2 * 2


@pytest.mark.engine
@pytest.mark.parametrize("replay", ["R2", "none"])
def test_other_ways_to_route(run: Make, replay: str) -> None:
    trainer = run("steps=2", f"loss.replay={replay}")
    trainer.train()
    dlogp = max(numbers(rows_of(trainer.record.folder), "dlogp_max"))
    assert dlogp <= DLOGP_BOUND


@pytest.mark.engine
def test_an_adapter_is_trained_and_exported_as_part_of_the_weights(run: Make) -> None:
    from transformers import AutoModelForCausalLM

    trainer = run(
        "steps=3",
        "model.lora.rank=4",
        "model.lora.target=all",
        "optim.lr=1e-2",
        "loss.arguments.kl_to_ref_coeff=0.01",
        "model.activation_checkpointing=true",
    )
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
def test_a_notebook_cell_trains(first_run: MoEGRPOTrainer, tmp_path: Path) -> None:
    engine, folder = first_run.rollout_engine.engine, first_run.record.folder / "model"
    # 15 lines at most:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]

    def exact(completion: str, answer: str) -> float:
        return float(completion == answer)

    config = GRPOConfig(steps=2, out=str(tmp_path / "run"))
    config.data.held_out, config.rollout.max_new_tokens, config.rollout.prompts_per_step = 10, 4, 2
    with MoEGRPOTrainer(str(folder), dataset=rows, rewards=exact, config=config, engine=engine) as trainer:
        trainer.train()
        trainer.plot()
    assert len(trainer.record.rows) == 2
    assert trainer.record.rows[0]["held_out_reward"] >= 0


@pytest.mark.engine
def test_a_reward_that_raises_costs_its_group(run: Make, caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def unreliable(completion: str, answer: str) -> float:
        asked.append(answer)
        if len(asked) % 40 == 1:
            raise ZeroDivisionError("no opinion")
        return float(completion == answer)

    trainer = run("steps=2", "rollout.prompts_per_step=8", rewards=unreliable)
    trainer.train()
    assert len(trainer.record.rows) == 2
    assert trainer.collector.stats()["collector/groups_dropped/failed"] >= 2
    assert "no opinion" in caplog.text


@pytest.mark.engine
def test_an_evaluation_that_raises_costs_no_more_than_that(run: Make, caplog: pytest.LogCaptureFixture) -> None:
    def reward(completion: str, answer: str) -> float:
        if answer == "held out":
            raise ZeroDivisionError("no opinion")
        return float(completion == answer)

    trainer = run("steps=2", "eval.every=1", rewards=reward, held_out=[{"prompt": "1+1=", "answer": "held out"}])
    trainer.train()
    assert trainer.record.column("held_out_reward") == []
    assert caplog.text.count("no evaluation at step") == 3


@pytest.mark.engine
def test_a_replica_that_is_killed_costs_nothing(run: Make) -> None:
    trainer = run("steps=3")
    entry = trainer.rollout_engine.engine.replica_table[0]
    first = process_of(entry.replica)

    def kill() -> None:
        if trainer.steps_done == 1:
            first.kill()

    trainer.register_op("post_steps", kill)
    trainer.train()
    rows = rows_of(trainer.record.folder)
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
    assert "agreement" not in failed_checks(rows)
    assert process_of(entry.replica) != first


@pytest.mark.engine
def test_a_full_disk_costs_no_older_checkpoint(
    run: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run("steps=3", "checkpoint.every=1", "checkpoint.keep=3")
    save, calls = torch.save, []

    def full(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if trainer.steps_done == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments, **options)

    monkeypatch.setattr(torch, "save", full)
    trainer.train()
    assert trainer.steps_done == 3 and calls
    assert "no checkpoint of step 2, the older ones are intact: [Errno 28] No space left on device" in caplog.text
    assert [path.name for path in trainer.checkpoints.rotation.checkpoints()] == [
        "step-000000000001",
        "step-000000000003",
    ]


# -- on a fake engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet() as service:
        yield service


def scores(trainer: MoEGRPOTrainer) -> dict[str, float]:
    paths = trainer.checkpoints.rotation.checkpoints()
    return {path.name[-1]: Checkpoint.manifest(path)["metadata"]["score"] for path in paths}


def test_a_checkpoint_is_scored_by_its_own_weights(
    fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config(tmp_path, 6)
    config.eval.every, config.checkpoint.every, config.checkpoint.keep = 2, 1, 9
    with fake_run(fleet, config, held_out=[{"prompt": "1+1="}]) as trainer:
        monkeypatch.setattr(trainer, "evaluate", lambda: float(trainer.steps_done))
        trainer.train()
        assert scores(trainer) == {"1": -1e300, "2": 2.0, "3": -1e300, "4": 4.0, "5": -1e300, "6": 6.0}


def test_weights_that_the_engine_has_not_got_are_not_evaluated(
    fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config(tmp_path, 5)
    config.eval.every, config.checkpoint.every, config.checkpoint.keep, config.engine.sync_every = 1, 1, 9, 2
    with fake_run(fleet, config, held_out=[{"prompt": "1+1="}]) as trainer:
        monkeypatch.setattr(trainer, "evaluate", lambda: float(trainer.steps_done))
        trainer.train()
        assert scores(trainer) == {"1": -1e300, "2": 2.0, "3": -1e300, "4": 4.0, "5": 5.0}


def test_rows_have_the_evaluation_before_them(
    fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config(tmp_path, 6)
    config.eval.every = 2
    with fake_run(fleet, config, held_out=[{"prompt": "1+1="}]) as trainer:
        monkeypatch.setattr(trainer, "evaluate", lambda: float(trainer.steps_done))
        trainer.train()
    assert [row["held_out_reward"] for row in trainer.record.rows] == [0.0, "", 2.0, "", 4.0, 6.0]


def test_a_resumed_run_has_the_learning_rate_that_is_asked_for(fleet: FakeFleet, tmp_path: Path) -> None:
    config = fake_config(tmp_path, 2)
    config.optim.schedule, config.optim.lr, config.checkpoint.every = "linear", 4e-4, 1
    with fake_run(fleet, config) as trainer:
        trainer.train()
    assert trainer.record.column("lr") == pytest.approx([4e-4, 2e-4])
    config.resume, config.steps, config.optim.lr, config.optim.weight_decay = True, 4, 8e-4, 0.5
    with fake_run(fleet, config) as again:
        again.train()
        (group,) = again.learner.optimizer.param_groups
        assert (group["weight_decay"], group["initial_lr"]) == (0.5, 8e-4)
    assert again.record.column("lr") == pytest.approx([4e-4, 2e-4, 4e-4, 2e-4])  # 8e-4 * (1 - 2 / 4), ...


def test_updates_that_the_engine_has_not_got_count_as_age_and_the_last_one_reaches_it(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    config = fake_config(tmp_path, 5)
    config.engine.sync_every = 3
    with fake_run(fleet, config) as trainer:
        trainer.train()
        assert torch.equal(fleet.fakes[0].weights["lm_head.weight"], trainer.policy_model.model.lm_head.weight)
    assert trainer.record.column("staleness") == [0.0, 1.0, 2.0, 0.0, 1.0]
    first = trainer.record.rows[0]["version"]
    assert [row["version"] - first for row in trainer.record.rows] == [0, 0, 1, 1, 2]


def test_a_mistake_costs_an_older_run_nothing(fleet: FakeFleet, tmp_path: Path) -> None:
    config = fake_config(tmp_path, 1)
    config.checkpoint.every = 1
    with fake_run(fleet, config) as trainer:
        trainer.train()
        with pytest.raises(ConfigError, match="is used by another run"):
            fake_run(fleet, config)
    config.rollout.order = "foo"
    with pytest.raises(ConfigError, match="order"):
        fake_run(fleet, config)
    assert len(rows_of(tmp_path)) == 1 and (tmp_path / "checkpoints" / "step-000000000001").exists()


def test_after_a_ctrl_c_the_engine_serves_and_another_trainer_continues(fleet: FakeFleet, tmp_path: Path) -> None:
    config = fake_config(tmp_path, 3)
    config.checkpoint.every = 1
    fleet.generate("hi", {"max_tokens": 1}, use_tqdm=False)  # starts its thread, which stays
    before = {"tqdm_monitor", *(thread.name for thread in threading.enumerate())}
    with interrupts() as interrupt, fake_run(fleet, config) as trainer:
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
    config.resume = True
    with fake_run(fleet, config) as again:
        again.train()
        assert again.steps_done == 3
    assert [int(row["step"]) for row in rows_of(tmp_path)] == [0, 1, 2]


def test_a_run_that_has_ended_says_how_to_continue(fleet: FakeFleet, tmp_path: Path) -> None:
    config = fake_config(tmp_path, 1)
    config.checkpoint.every = 0
    with fake_run(fleet, config) as trainer:
        trainer.train()
        trainer.config.steps = 3
        with pytest.raises(RuntimeError, match=r"this run has ended, or was interrupted: .* config\.resume=True"):
            trainer.train()
    assert not list((tmp_path / "checkpoints").glob("*"))


@pytest.mark.parametrize("kind", ["waits", "blocks"])
def test_a_held_out_reward_that_hangs_costs_its_evaluation(
    fleet: FakeFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    held_out = [{"prompt": "held out"}]
    config = fake_config(tmp_path, 1)
    config.eval.every, config.rollout.reward_timeout = 1, 0.3

    released = threading.Event()

    async def waits(prompt: str) -> float:
        if prompt == "held out":
            await asyncio.Event().wait()
        return 1.0

    def blocks(prompt: str) -> float:
        if prompt == "held out":
            released.wait(60)
        return 1.0

    try:
        with fake_run(fleet, config, rewards={"waits": waits, "blocks": blocks}[kind], held_out=held_out) as trainer:
            trainer.train()
            assert not released.is_set()
    finally:
        released.set()
    assert caplog.text.count("no evaluation at step") == 2 and "did not continue within 0.3 s" in caplog.text


# -- kills ------------------------------------------------------------------------------------------------------------


def wait_for_rows(metrics: Path, count: int, running: BaseProcess) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and running.exitcode is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) > count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {count} rows in time; exit code {running.exitcode}")


@pytest.mark.engine
def test_a_killed_run_continues_from_its_checkpoint(first_run: MoEGRPOTrainer, tmp_path: Path) -> None:
    few = (f"model.source={first_run.record.folder / 'model'}", "rollout.prompts_per_step=2")
    arguments = [f"out={tmp_path}", *few, "steps=500", "seed=3", "checkpoint.every=2", "eval.every=0"]
    arguments += ["log.progress=false", "engine.kind=transformers", "~engine.arguments.kv_cache_memory_bytes"]
    command = ["--config", "tiny_sums", *arguments]
    killed = multiprocessing.get_context("fork").Process(target=main, args=(command,))  # which has all imported
    killed.start()
    try:
        wait_for_rows(tmp_path / "metrics.csv", 3, killed)  # the last checkpoint is that of step 2, or a later one
    finally:
        killed.kill()
        killed.join()
    prompts = trained_prompts(tmp_path)
    config = short(tmp_path, "resume=true", "steps=1000")
    with MoEGRPOTrainer(config=config, engine=first_run.rollout_engine.engine) as again:
        done = again.steps_done
        assert done >= 2 and again.config.seed == 3
        assert again.rollout_engine.version >= done
        assert [row["step"] for row in again.record.rows] == list(range(done))
        again.config.steps = done + 2
        again.train()
    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(done + 2))
    assert "agreement" not in failed_checks(rows)
    after = trained_prompts(tmp_path)
    assert after[: 4 * done] == prompts[: 4 * done]


def trained_prompts(folder: Path) -> list[str]:
    """The prompts of the samples that were kept: the first four answers of each step."""
    return [json.loads(line)["prompt"] for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.engine
def test_a_checkpoint_of_another_model_is_refused(run: Make, first_run: MoEGRPOTrainer) -> None:
    trainer = run("steps=1", "model.lora.rank=2")
    state = TrainedState(trainer.policy_model.model)
    with pytest.raises(ConfigError, match="does not fit: the checkpoint is of another model: 41 names differ"):
        Checkpoints(first_run.record.folder / "checkpoints", state, {}, 1).load()


@pytest.mark.engine
def test_the_exported_model_loads_in_the_engine(first_run: MoEGRPOTrainer, no_engine: EngineShelf) -> None:
    first_run.rollout_engine.engine.shutdown()  # the last test that needs it: one engine at a time
    folder = first_run.record.folder / "model"
    with start_engine(folder, max_model_len=64) as engine:
        completion = engine.generate(prompt_token_ids=[2, 7, 14, 8, 17, 3], use_tqdm=False)
    assert completion.outputs[0].routed_experts.shape[1:] == (2, 2)
