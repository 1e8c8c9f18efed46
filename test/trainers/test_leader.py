"""What rank 0 makes: parts by the configuration, and an older run is forgotten but for what this one starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from support.training import fake_config, fake_fleet, fake_model
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.trainers import roles as leader_module
from torchrl_moe.trainers.checkpoints import Checkpoints
from torchrl_moe.trainers.config import ConfigError, ModelConfig
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.roles import Leader
from torchrl_moe.trainers.rollout_engine import Given


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet() as service:
        yield service


@pytest.fixture
def leader(tmp_path: Path) -> Leader:
    return Leader(fake_config(tmp_path / "run", 30))


def test_a_folder_is_locked_and_released(leader: Leader) -> None:
    release = leader.lock()
    with pytest.raises(ConfigError, match="is used by another run"):
        leader.lock()
    release()
    leader.lock()()


@pytest.mark.parametrize(("asked", "failures"), [(None, 6), (3, 3), (0, 0)])
def test_a_collector_as_the_configuration_says(
    leader: Leader, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, asked: int | None, failures: int
) -> None:
    made: dict[str, Any] = {}
    collector_of = leader_module.AsyncLLMCollector

    def make(env: Any, **arguments: Any) -> Any:
        made.update(arguments)
        return collector_of(env, **arguments)

    monkeypatch.setattr(leader_module, "AsyncLLMCollector", make)
    rollout = leader.config.rollout
    rollout.max_failures, rollout.max_staleness, rollout.window = asked, 3, 0.5
    policy_model = PolicyModel.load(fake_model(), ByteTokenizer(), ModelConfig())
    given = Given(dataset=[{"prompt": "1+1="}], rewards=lambda completion: 1.0)
    source = leader.source(policy_model.tokenizer, given)
    engine = leader.engine(policy_model, fleet)
    collector = leader.collector(source, engine)
    assert (made["group_size"], made["groups_per_batch"], made["max_staleness"], made["window"]) == (2, 2, 3, 0.5)
    assert made["max_failures"] == failures and made["group_filter"] is None
    before = collector.policy_version
    engine.sync()
    assert collector.policy_version == before + 1
    collector.shutdown()
    rollout.order = "sideways"
    with pytest.raises(ConfigError, match="rollout: order must be"):
        leader.collector(source, engine)
    engine.shutdown()


def test_loggers_by_name(leader: Leader) -> None:
    assert leader.loggers() == []
    leader.config.log.loggers = ["csv"]
    (logger,) = leader.loggers()
    assert logger.exp_name.startswith("events/")


def test_a_logger_that_is_not_installed_is_a_mistake(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("No module named 'wandb'")

    monkeypatch.setattr(leader_module, "get_logger", missing)
    leader.config.log.loggers = ["wandb"]
    with pytest.raises(ConfigError, match=r"^log: No module named 'wandb'$"):
        leader.loggers()


LEFT = ("checkpoints/step-000000000002/manifest.json", "model/config.json", "metrics.csv", "samples.jsonl")


@pytest.mark.parametrize("name", LEFT)
def test_a_folder_that_holds_a_run_is_refused_with_all_ways_out(leader: Leader, tmp_path: Path, name: str) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("step\n0\n")
    ways = r"set resume=True to continue it, overwrite=True to replace it, or out to another folder"
    for check in (leader.refuse_older_run, leader.lock):
        with pytest.raises(ConfigError, match=rf"out=.* holds a run \(.*{name.split('/')[0][:5]}.*\): {ways}"):
            check()
    for way in ("resume", "overwrite"):
        setattr(leader.config, way, True)
        leader.lock()()
        setattr(leader.config, way, False)
    assert file.read_text() == "step\n0\n"


def test_a_model_in_the_folder_is_not_to_be_removed(leader: Leader, tmp_path: Path) -> None:
    (tmp_path / "run" / "start-00000001").mkdir(parents=True)
    (tmp_path / "run" / "metrics.csv").write_text("step\n0\n")
    leader.config.overwrite = True
    with pytest.raises(ConfigError, match=r"overwrite=True would remove the model .*start-00000001, which is in out="):
        leader.refuse_older_run(tmp_path / "run" / "start-00000001")


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_older_run_is_forgotten_not_before_the_first_step(leader: Leader, tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / "run"
    for name in ("checkpoints/step-000000000002", "start-0000001d", "start-0000003e", "model"):
        (folder / name).mkdir(parents=True)
    (folder / "metrics.csv").write_text("step\n0\n")
    leader.config.overwrite = overwrite
    record = leader.record(0, folder / "start-0000003e")
    found = {path.name for path in folder.iterdir()}
    assert ("start-0000001d" in found) == ("checkpoints" in found) == ("config.yaml" not in found) == overwrite
    record.add({"step": 0})
    found = {path.name for path in folder.iterdir()}
    assert found == {"model", "start-0000003e", "config.yaml", "metrics.csv", "samples.jsonl", "versions.json"}
    assert "overwrite: false" in (folder / "config.yaml").read_text()  # a later start resumes


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_not_a_runs_stays(leader: Leader, tmp_path: Path, overwrite: bool) -> None:
    mine = [tmp_path / "run" / name for name in ("checkpoints/mine/model.bin", "checkpoints/.git/x", "start-here/x")]
    for file in mine:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    leader.config.overwrite = overwrite
    leader.lock()()
    Checkpoints(tmp_path / "run" / "checkpoints", cast(Any, None), {}, keep=1)
    leader.record(0, None).begin()
    assert [file.read_text() for file in mine] == ["mine"] * 3


@pytest.mark.parametrize("setting", ["overwrite", "resume", ""])
def test_a_file_that_no_run_has_written_is_not_replaced(leader: Leader, tmp_path: Path, setting: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("steps: 3  # mine\n")
    if setting:
        setattr(leader.config, setting, True)
    with pytest.raises(ConfigError, match=r"out=.*run holds config.yaml, which no run has written .*: rename it, or"):
        leader.lock()


def test_a_record_continues_from_a_step(leader: Leader, tmp_path: Path) -> None:
    leader.config.resume = True
    for step in range(3):
        leader.record(step, None).add({"step": step})
    assert [row["step"] for row in leader.record(2, None).rows] == [0, 1]
    assert (tmp_path / "run" / "config.yaml").exists()
