"""Runs of several ranks: on a fake engine what each does, in what order, and how they end; on vLLM what they reach."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pytest import MonkeyPatch
from tensordict import TensorDictBase, lazy_stack, set_list_to_stack
from transformers import AutoModelForCausalLM

from support.engines import EngineShelf
from support.processes import PYTHONPATH, is_gone
from support.rank_watch import syncs_of
from support.ranks import run_as_ranks, run_with_torchrun
from support.sharded import whole
from support.shared_training import SHARES_IN_ALL_WAYS, changed, learner_of
from support.sources import ROOT
from support.training import DLOGP_BOUND, fake_config, fake_fleet, fake_model, fake_run, numbers, rows_of
from support.waiting import until
from torchrl_moe.cli.main import main
from torchrl_moe.data.packed import unpack
from torchrl_moe.errors import RankError
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.trainers import ConfigError, GRPOConfig, MoEGRPOTrainer
from torchrl_moe.trainers import ranks as rendezvous
from torchrl_moe.trainers.compose import load_config
from torchrl_moe.trainers.config import Settings, as_dict
from torchrl_moe.trainers.ranks import Placement

pytestmark = pytest.mark.usefixtures("one_thread")

Watch = Callable[[MoEGRPOTrainer, dict[str, Any]], object]


def run(config: GRPOConfig, watch: Watch, **given: Any) -> dict[str, Any]:
    """One rank's, or the only process's; what it saw."""
    found: dict[str, Any] = {}
    numbers = itertools.count()  # the fake engine gives a prompt's answers alike
    given = {"rewards": lambda completion: float(next(numbers) % 5), **given}
    with set_list_to_stack(True), fake_fleet() as fleet:
        try:
            with fake_run(fleet, config, **given) as trainer:
                watch(trainer, found)
                trainer.train()
                found |= {"step": trainer.steps_done, "rows": trainer.record.rows}
                weights = trainer.policy_model.model.state_dict()
                found["weights"] = {name: whole(weight).numpy().copy() for name, weight in weights.items()}
                found["version"] = trainer.rollout_engine.version
                found["served"] = {name: weight.numpy() for name, weight in fleet.fakes[0].weights.items()}
        except (RankError, ConfigError, ArithmeticError) as error:
            found["error"] = f"{type(error).__name__}: {error}"
    return found


def config_of(folder: Path, steps: int) -> GRPOConfig:
    config = fake_config(folder, steps)
    config.rollout.prompts_per_step, config.optim.lr = 4, 1e-2
    config.checkpoint.every, config.eval.mismatch_every, config.placement.timeout = 2, 1, 60.0
    return config


def see_shares(trainer: MoEGRPOTrainer, found: dict[str, Any]) -> None:
    found["prompts"], found["tokens"], found["config"] = [], [], as_dict(trainer.config)
    refuse_changes()

    def see(batch: TensorDictBase) -> None:
        rows = batch.unbind(0)
        found["prompts"].append([(int(row["group_id"]), str(row["prompt"])) for row in rows])
        found["tokens"].append(sum(len(row["tokens", "response"]) for row in rows))

    trainer.register_op("batch_process", see)


def test_rank_0_gives_each_rank_whole_groups_and_writes_down_the_whole(tmp_path: Path) -> None:
    """And none of them writes into its configuration."""
    config = config_of(tmp_path, 3)
    config.eval.every, config.log.samples, config.log.loggers = 2, 2, ["csv"]
    given = as_dict(config)
    first, second = run_as_ranks(run, config, see_shares)
    assert first["config"] == second["config"] == given
    rows = rows_of(tmp_path)
    assert [row["step"] for row in first["rows"]] == [0, 1, 2] and second["rows"] == []
    for step in range(3):
        one, other = (set(rank["prompts"][step]) for rank in (first, second))
        assert not one & other
        groups = {group for group, _ in one | other}
        assert len(groups) == 4 and len(first["prompts"][step]) + len(second["prompts"][step]) == 8
        assert float(rows[step]["length"]) * 8 == first["tokens"][step] + second["tokens"][step]
    assert numbers(rows, "lr") == pytest.approx([1e-2] * 3) and first["step"] == second["step"] == 3
    assert first["version"] == second["version"]
    for name, weight in first["weights"].items():
        assert np.array_equal(weight, second["weights"][name])
    assert np.array_equal(first["served"]["lm_head.weight"], first["weights"]["lm_head.weight"])
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-000000000002", "step-000000000003"}


def refuse_changes() -> None:
    """From here on, in this process, which is a rank's."""

    def refuse(_: Settings, name: str, value: object) -> None:
        raise AssertionError(f"{name} is set to {value!r}")

    Settings.__setattr__ = refuse  # type: ignore[method-assign]


def nothing(trainer: MoEGRPOTrainer, found: dict[str, Any]) -> None:
    pass


def test_another_number_of_ranks_continues_with_a_run(tmp_path: Path) -> None:
    """One after two, and two after one."""
    starts = [run_as_ranks(run, config_of(tmp_path, 1), nothing)[0]]
    config = config_of(tmp_path, 2)
    config.resume = True
    starts.append(run(config, nothing))
    config.steps = 3
    starts.append(run_as_ranks(run, config, nothing)[0])
    for first, second in itertools.pairwise(starts):
        steps = len(first["rows"])
        assert [row["step"] for row in second["rows"]] == list(range(steps + 1))
        assert second["rows"][:steps] == first["rows"]
        assert any(not np.array_equal(second["weights"][name], first["weights"][name]) for name in first["weights"])


def export(trainer: MoEGRPOTrainer, found: dict[str, Any]) -> None:
    trainer.register_op("shutdown", trainer.save_pretrained)


EXPERTS_ALONE = pytest.mark.skipif(not SHARES_IN_ALL_WAYS, reason="this transformers splits no experts alone")


@pytest.mark.parity
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"placement.expert_parallel": 2, "rollout.max_staleness": 1}, marks=EXPERTS_ALONE),
        {"placement.tensor_parallel": 2, "optim.minibatches": 2},
        {"model.lora.rank": 2, "model.lora.target": "all", "engine.sync_every": 2, "optim.minibatches": 2},
    ],
    ids=["EP", "TP", "adapter"],
)
def test_the_engine_has_what_ranks_share_in_other_ways(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = changed(config_of(tmp_path, 3), changes)
    first, second = run_as_ranks(run, config, export)
    assert "error" not in first, first["error"]
    assert first["step"] == second["step"] == 3
    written = checkpoint_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32))
    assert first["served"].keys() == written.keys()
    assert all(np.array_equal(served, written[name].numpy()) for name, served in first["served"].items())
    started = checkpoint_tensors(fake_model())
    moved = {name for name in started if not torch.equal(started[name], written[name])}
    assert any("experts" in name for name in moved) and any("self_attn" in name for name in moved)


# -- how they end -----------------------------------------------------------------------------------------------------
def stop_second(trainer: MoEGRPOTrainer, found: dict[str, Any]) -> None:
    def stop() -> None:
        if not trainer.ranks.is_first and trainer.steps_done == 2:
            trainer.request_stop("enough")

    trainer.register_op("post_steps", stop)


def few_rollouts(trainer: MoEGRPOTrainer, found: dict[str, Any]) -> None:
    if trainer.ranks.is_first:
        trainer._batches = itertools.islice(iter(trainer.collector), 2)


@pytest.mark.parametrize("watch", [stop_second, few_rollouts])
def test_all_stop_where_one_is_asked_to_or_rank_0_has_no_more_rollouts(tmp_path: Path, watch: Watch) -> None:
    found = run_as_ranks(run, config_of(tmp_path, 9), watch)
    assert [rank["step"] for rank in found] == [2, 2]
    assert (tmp_path / "checkpoints" / "step-000000000002").exists()


def raise_at_2(rank: int) -> Watch:
    def watch(trainer: MoEGRPOTrainer, found: dict[str, Any]) -> None:
        def fail() -> None:
            if trainer.ranks.rank == rank and trainer.steps_done == 2:
                raise ZeroDivisionError("no luck")

        trainer.register_op("post_steps", fail)

    return watch


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_all_end_with_the_name_of_the_one_that_failed(tmp_path: Path, rank: int) -> None:
    found = run_as_ranks(run, config_of(tmp_path, 4), raise_at_2(rank))
    assert found[rank]["error"] == "ZeroDivisionError: no luck"
    assert found[1 - rank]["error"] == (
        f"RankError: rank {rank} failed (last met: weight sync): ZeroDivisionError: no luck"
    )
    assert len(rows_of(tmp_path)) in (1, 2)  # the second step is rank 0's to write, if it has not heard of it yet


def test_a_mistake_that_rank_0_finds_ends_all_and_leaves_nothing(tmp_path: Path) -> None:
    def both(config: GRPOConfig) -> dict[str, Any]:
        return run(config, nothing, rewards=lambda no_such_column: 1.0)

    first, second = run_as_ranks(both, config_of(tmp_path / "run", 2))
    assert first["error"].startswith("ConfigError: ") and "no_such_column" in first["error"]
    assert second["error"].startswith("RankError: rank 0 failed") and "no_such_column" in second["error"]
    assert not list((tmp_path / "run").glob("*"))


def kill_second(trainer: MoEGRPOTrainer, found: dict[str, Any]) -> None:
    def kill() -> None:
        if trainer.ranks.rank == 1 and trainer.steps_done == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.register_op("post_steps", kill)


def test_a_rank_that_is_killed_ends_the_others_and_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LEAVE_SECONDS", 0.5)
    config = config_of(tmp_path, 9)
    config.placement.timeout = 2.0  # a launcher such as torchrun would end the others at once
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        run_as_ranks(run, config, kill_second)
    config = config_of(tmp_path, 4)
    config.resume = True
    again = run_as_ranks(run, config, nothing)
    assert [row["step"] for row in again[0]["rows"]] == [0, 1, 2, 3]


# -- on vLLM ----------------------------------------------------------------------------------------------------------
def torchrun(ranks: int, *arguments: str) -> list[str]:
    script = str(ROOT / "tutorials" / "grpo" / "train.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, *arguments, script]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHONPATH}


EXACT = ("log.progress=false", "eval.every=0", "optim.max_tokens=320", "hooks=[support.rank_watch:watch]")


def exact_rows(out: Path) -> list[dict[str, str]]:
    """The metrics of a run with the settings ``EXACT``, each sync of which has sent what ranks have."""
    rows, sent = rows_of(out), syncs_of(out)
    assert max(numbers(rows, "dlogp_max")) <= DLOGP_BOUND
    assert all(sync["differ"] == 0 and sync["tensors"] > 20 for sync in sent)
    assert [sync["versions"] for sync in sent] == [[version] for version in range(1, len(rows) + 1)]
    return rows


@pytest.mark.engine
def test_two_ranks_of_torchruns_agent_step_as_one_process(tmp_path: Path, no_engine: EngineShelf) -> None:
    """The first gradient is that of one process, each sync is exact, and the engine computes as the trainer does."""
    out, model = tmp_path / "run", no_engine.folder("qwen3_moe")
    few = ["rollout.prompts_per_step=4", "steps=2", "checkpoint.every=2", "optim.max_grad_norm=null"]
    few += [f"model.source={model}", "data.rewards=[support.rank_watch:by_ids]"]  # it need not learn
    run_with_torchrun(main, ["train", "--config", "tiny_ranks", f"out={out}", *EXACT, *few], log=tmp_path / "log")
    rows = exact_rows(out)
    assert len(rows) == len(numbers(rows, "dlogp_max")) == 2
    assert_first_step(out, model, rows[0], answers=4 * 8)
    assert (out / "model" / "config.json").exists() and (out / "run.png").exists()


def assert_first_step(out: Path, model: Path, row: dict[str, str], answers: int) -> None:
    """Compare with one process, that has the whole batch."""
    config = load_config(str(out / "config.yaml"), ["hooks=[]", f"model.source={model}"])
    learner, policy_model = learner_of(config, Placement())
    with set_list_to_stack(True):
        batch = lazy_stack([row for rank in range(2) for row in unpack((out / f"share-{rank}").read_bytes()).unbind(0)])
        assert len(batch) == answers
        metrics = learner.scores(batch, 0, True)
        metrics |= {name: float(value) for name, value in learner.stepper.accumulate(batch).items()}
    found = torch.load(out / "gradients.pt")
    gradients = {name: weight.grad for name, weight in policy_model.trained.items() if weight.grad is not None}
    assert found.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 1e-4
    gap = max(float((found[name] - gradient).abs().max()) for name, gradient in gradients.items())
    print(f"gradients of the first step: {gap / largest:.1e} of the largest")
    assert gap <= 1e-5 * largest
    for column, name in {"loss": "loss_objective", "kl_approx": "kl_approx", "entropy": "entropy"}.items():
        assert float(row[column]) == pytest.approx(metrics[name], abs=1e-5)


@pytest.mark.engine
@pytest.mark.soak
def test_the_run_continues_when_ranks_and_a_replica_are_killed(tmp_path: Path, no_engine: EngineShelf) -> None:
    out = tmp_path / "run"
    settings = ["steps=100000", "checkpoint.every=2", "eval.every=0", "log.progress=false"]
    settings += ["rollout.prompts_per_step=8", f"out={out}"]
    command = [*torchrun(2, "--max-restarts=4"), "--config", "tiny_ranks", *settings]
    family: set[int] = set()
    with subprocess.Popen([*command, "hooks=[support.rank_watch:note_processes]"], env=environment()) as agent:

        def has_steps(count: int) -> bool:
            assert agent.poll() is None, "the launcher has ended"
            family.update(child.pid for child in psutil.Process(agent.pid).children(recursive=True))
            return (out / "metrics.csv").exists() and len(rows_of(out)) >= count

        try:
            until(lambda: has_steps(4), 600)
            for victim in ("rank-1", "replica", "rank-0"):
                pid, done = int((out / f"{victim}.pid").read_text()), len(rows_of(out))
                os.kill(pid, signal.SIGKILL)
                until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]
                until(lambda done=done: has_steps(done + 4), 600)  # type: ignore[misc]
        finally:
            agent.terminate()
    until(lambda: all(map(is_gone, family)), 60)
    rows = rows_of(out)
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    assert max(numbers(rows, "dlogp_max")) <= DLOGP_BOUND  # the engine had the trainer's weights after each start
    reward = numbers(rows, "reward")
    print("reward:", " ".join(f"{value:.2f}" for value in reward))
    assert sum(reward[-5:]) / 5 > sum(reward[:3]) / 3
