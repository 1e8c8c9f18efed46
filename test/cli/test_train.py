"""``torchrl-moe train``: what it prints, what it refuses in one line, and what a run leaves, on a fake engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from pytest import CaptureFixture, MonkeyPatch, TempPathFactory
from tensordict import set_list_to_stack

from torchrl_moe.cli import services as engines
from torchrl_moe.cli import train
from torchrl_moe.cli.main import main
from torchrl_moe.cli.train import configurations, export
from torchrl_moe.errors import RankError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.policies.unstack import model_metadata
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.trainers import ConfigError, GRPOConfig, MoEGRPOTrainer, grpo_trainer
from torchrl_moe.trainers.compose import CONFIGS, load_config
from torchrl_moe.trainers.config import ModelConfig, RolloutConfig
from torchrl_moe.trainers.policy_model import PolicyModel

NAMES = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
REWARD = f"{__name__}:exact"


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", lambda *_, **__: pytest.fail("an engine was started"))


def as_json(capsys: CaptureFixture[str], *words: str) -> Any:
    assert main(["train", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# -- what it prints ---------------------------------------------------------------------------------------------------
def test_every_configuration_is_listed_with_what_it_is(capsys: CaptureFixture[str]) -> None:
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(len(about) > 20 and about.endswith(".") for about in configurations().values())
    assert as_json(capsys, "--list") == configurations()


def test_a_configuration_is_printed_with_what_was_set_and_without_what_was_taken_out(
    capsys: CaptureFixture[str],
) -> None:
    # settings before, between and behind options
    shown = as_json(capsys, "steps=7", "--config", "tiny_sums", "optim.lr=1e-5", "--cfg", "seed=3")
    assert (shown["steps"], shown["optim"]["lr"], shown["seed"]) == (7, 1e-5, 3)
    assert "kv_cache_memory_bytes" in as_json(capsys, "--config", "tiny_cpu", "--cfg")["engine"]["arguments"]
    without = as_json(capsys, "--cfg", "~engine.arguments.kv_cache_memory_bytes")
    assert "kv_cache_memory_bytes" not in without["engine"]["arguments"]


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_that_is_printed_is_read_again(name: str, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    changes = ["optim.lr=3e-5", "loss.arguments.clip_epsilon=[0.1, 0.3]", f"out={tmp_path / 'run'}"]
    assert main(["train", "--config", name, "--cfg", *changes]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(printed := capsys.readouterr().out)
    assert "None" not in printed  # YAML says null
    again = load_config(file)
    assert again == load_config(name, changes)
    assert (again.optim.lr, again.loss.arguments["clip_epsilon"]) == (3e-5, [0.1, 0.3])
    assert not (tmp_path / "run").exists()


# -- what it refuses --------------------------------------------------------------------------------------------------
def rows(columns: str = "prompt,answer") -> Any:
    return [dict(zip(columns.split(","), (f"{i}+1=", str(i + 1)), strict=True)) for i in range(8)]


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


def unkind() -> Any:
    raise RuntimeError("not today\nnor tomorrow")


@pytest.fixture(scope="module")
def base(tmp_path_factory: TempPathFactory) -> str:
    """The file of a configuration, of a model beside it."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_moe(folder / "moe", num_hidden_layers=2)
    named = {"model": {"source": str(folder / "moe")}, "data": {"source": f"{__name__}:rows", "rewards": [REWARD]}}
    (folder / "base.yaml").write_text(yaml.safe_dump(named))
    return str(folder / "base.yaml")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


BAD = [
    ("tiny_async", "'tiny_async' is not a setting: write key=value; --config names a configuration"),
    ("nonsense=1", "nonsense"),
    ("model.source=./no/such/folder", "model.source=./no/such/folder: there is no model in that folder"),
    (f"model.source={__name__}:unkind", "RuntimeError: not today"),
    ("loss.reference=adapter", "loss.reference=adapter needs an adapter"),
    ("data.arguments.columns='prompt,solution'", "asks for 'answer'"),
    ("data.held_out=8", "held_out=8 leaves none of 8 rows to train on"),
    ("engine.sync.mode=later", "engine.sync: mode must be"),
    ("hooks=[no_such_module:hook]", "hooks: cannot import 'no_such_module'"),
    ("--config nonsense", "there is no configuration nonsense; the package has multi_node, olmoe_1b_7b"),
    ("resume=true out=./no/such/run", " there is no run in ./no/such/run"),
]


@pytest.mark.parametrize(("settings", "said"), BAD)
def test_bad_input_is_one_clear_line_and_an_older_run_stays(
    base: str, tmp_path: Path, capsys: CaptureFixture[str], settings: str, said: str
) -> None:
    for name in ("config.yaml", "metrics.csv", "checkpoints/step-000000000004/manifest.json", "start/config.json"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(name)
    before = contents(tmp_path / "run")
    capsys.readouterr()
    words = ["train", "--config", base, f"out={tmp_path / 'run'}", "overwrite=true", *settings.split(" ")]
    assert main(words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "it/s]" not in line]  # its bars
    assert len(lines) == 1 and lines[0].startswith("torchrl-moe train: ") and said in lines[0]
    assert contents(tmp_path / "run") == before


def test_a_reward_that_is_not_there_is_refused_before_the_model_is_made(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "lacks_one.py").write_text("import no_such_thing")
    (tmp_path / "lies_here.py").write_text("def letters(completion): return len(completion)")
    missing = f"there is no no_such_rewards.py, and no package no_such_rewards, in {tmp_path}, "
    for module, more, said in (
        ("no_such_rewards", [], f"data.rewards: cannot import 'no_such_rewards': {missing}"),
        ("lacks_one", [], "data.rewards: cannot import 'lacks_one': No module named 'no_such_thing'"),
        ("lies_here", [], "model.source=./no/such/model"),
        (
            "lies_here",
            ["engine.kind=transformers", "engine.arguments.foo=1"],
            "engine.arguments: engine='transformers'",
        ),
    ):
        words = ["train", "out=run", "model.source=./no/such/model", f"data.rewards=[{module}:letters]", *more]
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"torchrl-moe train: {said}") and "pip install" not in line
    assert not (tmp_path / "run").exists()


def test_without_vllm_it_ends_before_anything_is_written(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    monkeypatch.setattr(train, "run", ran.append)
    assert main(["train"]) == 2 and not ran and "or use engine.kind=transformers" in capsys.readouterr().err
    assert main(["train", "engine.kind=transformers"]) == 0 and len(ran) == 1


# -- how a run ends ---------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; resume=true continues from the last checkpoint"),
        (RankError("weight sync: rank 3 did not come"), 1, "weight sync: rank 3 did not come"),  # another rank's error
    ],
)
def test_a_run_that_is_cut_short_is_one_line(
    error: BaseException, code: int, said: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    def run(config: Any) -> None:
        raise error

    monkeypatch.setattr(train, "run", run)
    assert main(["train"]) == code
    assert capsys.readouterr().err == f"torchrl-moe train: {said}\n"


EXACT = ["engine.kind=transformers", "engine.arguments.max_model_len=64", "engine.arguments.dtype=float32"]
EXACT += ["parity=exact", "model.dtype=float32"]


@pytest.mark.parametrize(
    ("settings", "environment", "threads"),
    [
        ([], {}, 4),
        ([], {"WORLD_SIZE": "2"}, 1),
        (["rollout.max_staleness=2"], {}, 1),
        (["rollout.max_staleness=2"], {"OMP_NUM_THREADS": "3"}, 4),  # torch has read it when it was imported
        # of eight processors, say four cores with two threads each, an engine takes seven, and two take three each
        (EXACT, {}, 7),
        ([*EXACT, "engine.num_replicas=2"], {}, 3),
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


@pytest.mark.parametrize("first", [True, False])
def test_rank_0_alone_draws_and_prints(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], first: bool
) -> None:
    trainer = MagicMock()
    trainer.__enter__.return_value = trainer
    trainer.ranks.is_first, trainer.record.folder, trainer.summary.return_value = first, tmp_path, "summed up"
    monkeypatch.setattr(grpo_trainer, "MoEGRPOTrainer", lambda config: trainer)
    train.run(GRPOConfig())
    done = [name for name, *_ in trainer.mock_calls if not name.startswith("record")]
    drawn = ["plot", "plot().savefig", "summary"] if first else []
    assert done == ["__enter__", "train", "save_pretrained", *drawn, "__exit__"]
    assert ("summed up" in capsys.readouterr().out) == first


# -- what a run leaves, on a fake engine ------------------------------------------------------------------------------
def other_model(seed: int) -> Any:
    return make_tiny_moe("qwen3_moe", seed=seed, num_hidden_layers=4, num_experts=8, num_experts_per_tok=2)


def saved(seed: int, folder: Path) -> Path:
    return PolicyModel.load(other_model(seed), ByteTokenizer(), ModelConfig()).save(folder)


def trainer_of(out: Path, source: str, resume: bool = False) -> MoEGRPOTrainer:
    config = GRPOConfig(out=str(out), steps=2, model=ModelConfig(source=source), resume=resume)
    config.rollout = RolloutConfig(prompts_per_step=2, group_size=2, max_new_tokens=3)
    config.log.loggers, config.log.progress, config.eval.every, config.checkpoint.every = [], False, 0, 1
    fleet = FakeFleet(1, expected=model_metadata(other_model(0)))
    return MoEGRPOTrainer(dataset=rows(), rewards=exact, config=config, engine=fleet)


def test_a_run_from_a_folder_does_not_continue_with_another_runs_model(tmp_path: Path) -> None:
    """A model that a function made for an older run lies in the same folder."""
    saved(3, tmp_path / "run" / "start-00000001")
    with set_list_to_stack(True), trainer_of(tmp_path / "run", str(saved(4, tmp_path / "mine")), True) as trainer:
        assert trainer.policy_model.model.lm_head.weight.equal(other_model(4).lm_head.weight)


def test_a_checkpoint_becomes_a_model(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    folder, model = saved(1, tmp_path / "mine"), tmp_path / "run" / "model"
    with set_list_to_stack(True), trainer_of(tmp_path / "run", str(folder)) as trainer:
        head = trainer.policy_model.model.lm_head.weight.data

        def change() -> None:
            head.add_(1)

        trainer.register_op("post_steps", change)
        trainer.train()
        weights = {name: weight.clone() for name, weight in trainer.policy_model.trained.items()}

    def is_last() -> bool:
        found = PolicyModel.load(str(model), None, ModelConfig()).trained
        return all(weights[name].equal(weight) for name, weight in found.items())

    assert main(["train", "--export", str(tmp_path / "run")]) == 0
    assert str(model) in capsys.readouterr().out and is_last()
    assert export(tmp_path / "run" / "checkpoints" / "step-000000000001") == model and not is_last()
    assert main(["train", "--export", str(tmp_path)]) == 2
    assert "is no folder of a run with checkpoints" in capsys.readouterr().err


def test_a_mistake_ends_the_engine_of_the_reference(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    references = []

    def start(*_: Any, **__: Any) -> FakeFleet:
        if references:
            raise ConfigError("the second engine does not start")
        references.append(FakeFleet(1))
        return references[-1]

    monkeypatch.setattr(AsyncVLLM, "from_pretrained", start)
    model = ModelConfig(source=str(saved(1, tmp_path / "mine")))
    config = GRPOConfig(out=str(tmp_path / "run"), model=model)
    config.loss.reference, config.loss.arguments = "engine", {"kl_to_ref_coeff": 0.1}
    with pytest.raises(ConfigError, match="the second engine does not start"):
        MoEGRPOTrainer(dataset=rows(), rewards=exact, config=config)
    (reference,) = references
    with pytest.raises(RuntimeError):
        reference.generate("after the end", use_tqdm=False)
