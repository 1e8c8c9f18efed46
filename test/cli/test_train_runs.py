"""``torchrl-moe train``: bad input is one clear line and exit code 2, and costs an older run nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from pytest import CaptureFixture, MonkeyPatch, TempPathFactory
from tensordict import set_list_to_stack

from torchrl_moe.cli import train
from torchrl_moe.cli.main import main as cli
from torchrl_moe.cli.train import export
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

REWARD = f"{__name__}:exact"


def rows(columns: str = "prompt,answer") -> Any:
    return [dict(zip(columns.split(","), (f"{i}+1=", str(i + 1)), strict=True)) for i in range(8)]


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


def unkind() -> Any:
    raise RuntimeError("not today\nnor tomorrow")


@pytest.fixture(scope="module")
def models(tmp_path_factory: TempPathFactory) -> Path:
    """Folders of a model with experts and of one without."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_moe(folder / "moe", num_hidden_layers=2)
    save_tiny_moe(folder / "dense", "qwen3", num_hidden_layers=1)
    named = {"model": {"source": str(folder / "moe")}, "data": {"source": f"{__name__}:rows", "rewards": [REWARD]}}
    (folder / "base.yaml").write_text(yaml.safe_dump(named))
    return folder


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> Any:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(AsyncVLLM, "from_pretrained", start)


def run(models: Path, out: Path, *overrides: str) -> int:
    return cli(["train", "--config", str(models / "base.yaml"), f"out={out}", *overrides])


def older_run(out: Path) -> dict[str, bytes]:
    """Leave the files of an older run; return them."""
    files = ("config.yaml", "metrics.csv", "checkpoints/step-000000000004/manifest.json", "start/config.json")
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    return contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


BAD = [
    (["nonsense=1"], "nonsense"),
    (
        ["rollout.prompts_per_step=3", "rollout.group_size=4", "optim.minibatches=5"],
        "optim.minibatches=5 does not divide",
    ),
    (["loss.name=Loss"], "loss.name=Loss must be one of"),
    (["loss.reference=adapter"], "loss.reference=adapter needs an adapter"),
    (["model.source=./no/such/folder"], "model.source=./no/such/folder: there is no model in that folder"),
    (["model.source=no_such_module:model"], "cannot import 'no_such_module'"),
    ([f"model.source={__name__}:unkind"], "RuntimeError: not today"),
    (["data.rewards=[no_such_module:reward]"], "cannot import 'no_such_module'"),
    (["data.arguments.columns='prompt,solution'"], "asks for 'answer'"),
    (["data.held_out=8"], "held_out=8 leaves none of 8 rows to train on"),
    (["engine.sync.mode=later"], "engine.sync: mode must be"),
    (["hooks=[no_such_module:hook]"], "hooks: cannot import 'no_such_module'"),
    (["--config", "nonsense"], "there is no configuration nonsense; the package has multi_node, olmoe_1b_7b"),
    (["resume=true", "out=./no/such/run"], " there is no run in ./no/such/run"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=[" ".join(overrides)[:50] for overrides, _ in BAD])
def test_bad_input_is_one_clear_line_and_nothing_is_written(
    models: Path, tmp_path: Path, capsys: CaptureFixture[str], overrides: list[str], message: str
) -> None:
    before = older_run(tmp_path / "run")
    capsys.readouterr()
    assert run(models, tmp_path / "run", "overwrite=true", *overrides) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line and "it/s]" not in line
    ]  # transformers' bars
    assert len(lines) == 1 and message in lines[0] and contents(tmp_path / "run") == before


def test_a_name_that_the_hub_does_not_have(
    models: Path, tmp_path: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # the variable is read at import
    assert run(models, tmp_path / "run", "model.source=no/such-model") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "model.source=no/such-model: " in line and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", sorted(file.stem for file in CONFIGS.glob("*.yaml")))
def test_a_configuration_that_is_printed_is_read_again(name: str, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    changes = ["optim.lr=3e-5", "loss.arguments.clip_epsilon=[0.1, 0.3]", f"out={tmp_path / 'run'}"]
    assert cli(["train", "--config", name, "--cfg", *changes]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(printed := capsys.readouterr().out)
    assert "None" not in printed  # YAML says null
    again = load_config(file)
    assert again == load_config(name, changes)
    assert (again.optim.lr, again.loss.arguments["clip_epsilon"]) == (3e-5, [0.1, 0.3])
    assert not (tmp_path / "run").exists()


def test_help_names_the_configurations(capsys: CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli(["train", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "tiny_cpu" in shown and "key=value" in shown and "resume=true" in shown


# -- what a run leaves, on a fake engine ------------------------------------------------------------------------------
def other_model(seed: int) -> Any:
    return make_tiny_moe("qwen3_moe", seed=seed, num_hidden_layers=4, num_experts=8, num_experts_per_tok=2)


def made(seed: int) -> Any:
    return other_model(seed), ByteTokenizer()


def trainer_of(out: Path, source: str, seed: int = 0, **changes: Any) -> MoEGRPOTrainer:
    arguments = {"seed": seed} if ":" in source else {}
    config = GRPOConfig(out=str(out), steps=2, model=ModelConfig(source=source, arguments=arguments))
    config.rollout = RolloutConfig(prompts_per_step=2, group_size=2, max_new_tokens=3)
    config.log.loggers, config.log.progress, config.eval.every, config.checkpoint.every = [], False, 0, 1
    for name, value in changes.items():
        setattr(config, name, value)
    fleet = FakeFleet(1, expected=model_metadata(other_model(0)))
    return MoEGRPOTrainer(dataset=rows(), rewards=exact, config=config, engine=fleet)


def first_weight(trainer: MoEGRPOTrainer) -> float:
    return float(trainer.policy_model.model.lm_head.weight[0, 0])


def test_a_run_begins_with_the_model_that_was_made_for_it(tmp_path: Path) -> None:
    PolicyModel.load(*made(3), ModelConfig()).save(tmp_path / "run" / "start-00000001")
    (tmp_path / "run" / "metrics.csv").write_text("step\n")
    (tmp_path / "run" / "config.yaml").write_text("steps: 1")
    with set_list_to_stack(True), trainer_of(tmp_path / "run", f"{__name__}:made", seed=3, resume=True) as trainer:
        assert first_weight(trainer) == float(other_model(3).lm_head.weight[0, 0])
        assert trainer.policy_model.source == str(tmp_path / "run" / "start-00000001")


def test_a_run_from_a_folder_does_not_continue_with_another_runs_model(tmp_path: Path) -> None:
    """A model that a function made for an older run lies in the same folder."""
    PolicyModel.load(*made(3), ModelConfig()).save(tmp_path / "run" / "start-00000001")
    folder = PolicyModel.load(*made(4), ModelConfig()).save(tmp_path / "mine")
    with set_list_to_stack(True), trainer_of(tmp_path / "run", str(folder), resume=True) as trainer:
        assert first_weight(trainer) == float(other_model(4).lm_head.weight[0, 0])


def test_a_checkpoint_becomes_a_model(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    folder = PolicyModel.load(*made(1), ModelConfig()).save(tmp_path / "mine")
    with set_list_to_stack(True), trainer_of(tmp_path / "run", str(folder)) as trainer:
        head = trainer.policy_model.model.lm_head.weight.data
        trainer.register_op("post_steps", lambda: (head.add_(1), None)[1])
        trainer.train()
        weights = {name: weight.clone() for name, weight in trainer.policy_model.trained.items()}
    assert cli(["train", "--export", str(tmp_path / "run")]) == 0
    assert str(tmp_path / "run" / "model") in capsys.readouterr().out
    exported = PolicyModel.load(str(tmp_path / "run" / "model"), None, ModelConfig()).trained
    assert all(weights[name].equal(weight) for name, weight in exported.items())
    assert export(tmp_path / "run" / "checkpoints" / "step-000000000001") == tmp_path / "run" / "model"
    first = PolicyModel.load(str(tmp_path / "run" / "model"), None, ModelConfig()).trained
    assert not all(weights[name].equal(weight) for name, weight in first.items())
    assert cli(["train", "--export", str(tmp_path)]) == 2
    assert "is no folder of a run with checkpoints" in capsys.readouterr().err


def test_a_mistake_ends_the_engine_of_the_reference(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    references = []

    def start(*_: Any, **__: Any) -> FakeFleet:
        if references:
            raise ConfigError("the second engine does not start")
        references.append(FakeFleet(1))
        return references[-1]

    monkeypatch.setattr(AsyncVLLM, "from_pretrained", start)
    folder = PolicyModel.load(*made(1), ModelConfig()).save(tmp_path / "mine")
    config = GRPOConfig(out=str(tmp_path / "run"), model=ModelConfig(source=str(folder)))
    config.loss.reference, config.loss.arguments = "engine", {"kl_to_ref_coeff": 0.1}
    with pytest.raises(ConfigError, match="the second engine does not start"):
        MoEGRPOTrainer(dataset=rows(), rewards=exact, config=config)
    (reference,) = references
    with pytest.raises(RuntimeError):
        reference.generate("after the end", use_tqdm=False)


# -- several ranks ----------------------------------------------------------------------------------------------------
def test_what_happened_to_another_rank_is_one_line(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RankError("weight sync: rank 3 did not come within 600 s")

    monkeypatch.setattr(train, "run", fail)
    assert cli(["train", "--config", "tiny_ranks"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith(": weight sync: rank 3 did not come within 600 s")


@pytest.mark.parametrize("first", [True, False])
def test_rank_0_alone_draws_and_prints(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], first: bool
) -> None:
    done: list[str] = []

    class Trainer:
        ranks = SimpleNamespace(is_first=first)
        record = SimpleNamespace(rows=[1], folder=tmp_path)

        def __init__(self, config: GRPOConfig) -> None:
            del config

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            done.append("closed")

        def train(self) -> None:
            done.append("trained")

        def save_pretrained(self) -> None:
            done.append("saved")

        def plot(self) -> Any:
            return SimpleNamespace(savefig=lambda file: done.append(file.name))

        def summary(self) -> str:
            return "summed up"

    monkeypatch.setattr(grpo_trainer, "MoEGRPOTrainer", Trainer)
    train.run(GRPOConfig())
    assert done == ["trained", "saved", *(["run.png"] if first else []), "closed"]
    assert ("summed up" in capsys.readouterr().out) == first
