"""``torchrl-moe train``: the packaged configurations, and what the trainer's script makes of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch

from torchrl_moe.cli import services as engines
from torchrl_moe.cli import train
from torchrl_moe.cli.main import main
from torchrl_moe.cli.train import configurations
from torchrl_moe.trainers import GRPOConfig
from torchrl_moe.trainers.compose import CONFIGS


def test_every_configuration_is_listed_with_what_it_is(capsys: CaptureFixture[str]) -> None:
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    assert all(len(about) > 20 and about.endswith(".") for about in configurations().values())
    assert main(["train", "--list", "--json"]) == 0 and json.loads(capsys.readouterr().out) == configurations()


def test_a_configuration_is_printed(capsys: CaptureFixture[str]) -> None:
    # settings before, between and behind options
    assert main(["train", "steps=7", "--config", "tiny_sums", "optim.lr=1e-5", "--cfg", "--json", "seed=3"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["steps"], shown["optim"]["lr"], shown["seed"]) == (7, 1e-5, 3)


def test_a_key_of_a_configuration_is_taken_out(capsys: CaptureFixture[str]) -> None:
    assert main(["train", "--config", "tiny_cpu", "--cfg", "--json"]) == 0
    assert "kv_cache_memory_bytes" in json.loads(capsys.readouterr().out)["engine"]["arguments"]
    assert main(["train", "--cfg", "--json", "~engine.arguments.kv_cache_memory_bytes"]) == 0
    assert "kv_cache_memory_bytes" not in json.loads(capsys.readouterr().out)["engine"]["arguments"]


def test_a_plan_starts_nothing(capsys: CaptureFixture[str]) -> None:
    assert main(["train", "--config", "olmoe_1b_7b", "plan=true", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["totals"]["engine, each GPU"] > 1e9
    assert {row["part"] for row in plan["rows"]} >= {"trainer, each GPU", "host of the trainer"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tiny_async"], "'tiny_async' is not a setting: write key=value; --config names a configuration"),
        (["optim.lr=fast"], "optim.lr"),
    ],
)
def test_bad_use_is_one_line(arguments: list[str], line: str, capsys: CaptureFixture[str]) -> None:
    assert main(["train", *arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("torchrl-moe train: ") and line in said


def test_a_run_ends_with_its_last_step(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    def run(config: GRPOConfig) -> None:
        (tmp_path / "metrics.csv").write_text("step,reward,note\n0,0.25,\n1,0.5,good\n")
        print("a table for people")

    monkeypatch.setattr(train, "run", run)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", f"out={tmp_path}", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"folder": str(tmp_path), "last_step": {"step": 1.0, "reward": 0.5, "note": "good"}}
    assert err == "a table for people\n"
    monkeypatch.setenv("RANK", "1")
    assert main(["train", f"out={tmp_path}", "--json"]) == 0 and capsys.readouterr().out == ""


EXACT = [
    "parity=exact",
    "engine.kind=transformers",
    "engine.arguments.dtype=float32",
    "engine.arguments.max_model_len=64",
]


@pytest.mark.parametrize(
    ("settings", "environment", "threads"),
    [
        ([], {}, 4),
        ([], {"WORLD_SIZE": "2"}, 1),
        (["rollout.max_staleness=2"], {}, 1),
        ([], {"OMP_NUM_THREADS": "3"}, 4),  # torch has read it when it was imported
        (["rollout.max_staleness=2"], {"OMP_NUM_THREADS": "3"}, 4),
        # of eight processors, say four cores with two threads each, an engine takes seven, and two take three each
        ([*EXACT, "model.dtype=float32"], {}, 7),
        ([*EXACT, "model.dtype=float32", "engine.num_replicas=2"], {}, 3),
    ],
)
def test_an_idle_engine_leaves_its_cores_to_training(
    settings: list[str], environment: dict[str, str], threads: int, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    found = []

    def trainer(config: GRPOConfig) -> None:
        found.append(torch.get_num_threads())
        raise ZeroDivisionError  # there is nothing to train

    monkeypatch.setattr("torchrl_moe.trainers.grpo_trainer.MoEGRPOTrainer", trainer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for name in ("OMP_NUM_THREADS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert main(["train", f"out={tmp_path}", *settings]) == 1
    finally:
        torch.set_num_threads(before)
    assert found == [threads]


def test_after_an_interrupt_a_run_can_continue(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    def run(config: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", run)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "torchrl-moe train: interrupted; resume=true continues from the last checkpoint\n"


def test_a_reward_that_is_not_there_is_refused_before_the_model_is_made(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "lacks_one.py").write_text("import no_such_thing")
    arguments = ["train", "out=run", "model.source=./no/such/model"]
    for name, said in (
        ("no_such_rewards", f"there is no no_such_rewards.py, and no package no_such_rewards, in {tmp_path}, "),
        ("lacks_one", "No module named 'no_such_thing'"),
    ):
        assert main([*arguments, f"data.rewards=[{name}:letters]"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"torchrl-moe train: data.rewards: cannot import '{name}': {said}"), line
        assert "pip install" not in line
    (tmp_path / "lies_here.py").write_text("def letters(completion): return len(completion)")
    assert main([*arguments, "data.rewards=[lies_here:letters]"]) == 2
    assert "model.source=./no/such/model" in capsys.readouterr().err
    of_engine = ["engine.kind=transformers", "engine.arguments.foo=1", "data.rewards=[lies_here:letters]"]
    assert main([*arguments, *of_engine]) == 2
    assert "engine.arguments: engine='transformers' has no foo=1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_vllm_it_ends_before_anything_is_written(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    monkeypatch.setattr(train, "run", ran.append)
    assert main(["train"]) == 2 and not ran and "or use engine.kind=transformers" in capsys.readouterr().err
    assert main(["train", "engine.kind=transformers"]) == 0 and len(ran) == 1
