"""What rank 0 does beside training, and what the other ranks have in its place; runs are in test_run_on_ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tensordict import TensorDict, lazy_stack

from support.training import fake_config, fake_fleet, fake_model
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.trainers import roles as leader_module
from torchrl_moe.trainers.checkpoints import Checkpoints
from torchrl_moe.trainers.config import ConfigError, ModelConfig
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.ranks import Ranks, pack
from torchrl_moe.trainers.roles import Evaluation, Follower, Leader, SignalFilter
from torchrl_moe.trainers.rollout_engine import Given


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet() as service:
        yield service


@pytest.fixture
def leader(tmp_path: Path) -> Leader:
    return Leader(fake_config(tmp_path / "run", 30))


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


class Second(Ranks):
    """The second of two ranks; what rank 0 gives it was drawn up before."""

    rank, size = 1, 2

    def __init__(self, *payloads: bytes | None) -> None:
        self.phases: list[tuple[str, bool]] = []
        self._payloads: Iterator[Any] = iter(payloads)

    def meet(self, phase: str, patient: bool = False) -> None:
        self.phases.append((phase, patient))

    def scatter(self, values: Any) -> Any:
        assert values is None
        return next(self._payloads)


@pytest.fixture
def policy_model() -> PolicyModel:
    return PolicyModel.load(fake_model(), ByteTokenizer(), ModelConfig())


def test_it_takes_shares_until_there_are_no_more(tmp_path: Path) -> None:
    ranks = Second(pack(TensorDict({"a": 1})), pack(TensorDict({"a": 2})), None)
    follower = Follower(fake_config(tmp_path, 2), ranks)
    rollouts = follower.collector(follower.source(None, Given()), None)  # type: ignore[arg-type]
    assert [int(share["a"]) for share in rollouts] == [1, 2] and ranks.phases == [("rollouts", True)] * 3
    rollouts.shutdown()


def test_it_reads_no_data_writes_nothing_and_evaluates_nothing(tmp_path: Path) -> None:
    config = fake_config(tmp_path / "run", 2)
    config.eval.every, config.log.samples, config.log.progress, config.log.loggers = 3, 2, True, ["csv"]
    follower = Follower(config, Second())
    assert (config.eval.every, config.log.samples, config.log.progress) == (0, 0, False)
    assert follower.loggers() == []
    assert follower.source(None, Given(dataset="no/such/file.jsonl")).evaluate(None) is None  # type: ignore[arg-type]
    follower.lock()()
    record = follower.record(7, None)
    assert (record.rows, record.column("reward"), record.folder) == ([], [], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_it_takes_part_in_sending_weights(tmp_path: Path, policy_model: PolicyModel) -> None:
    engine = Follower(fake_config(tmp_path, 2), Second()).engine(policy_model, object())
    sent: list[str] = []
    engine.sender.update_weights = lambda: sent.append("weights")  # type: ignore[method-assign, assignment, return-value]
    engine.sync()
    engine.restore(5)
    assert sent == ["weights", "weights"] and engine.version == 0
    engine.sleep()
    engine.wake_up()
    engine.forget_start()
    engine.shutdown()
    engine.shutdown()


def group(*rewards: float) -> Any:
    return turns(*([reward] for reward in rewards))


def turns(*samples: list[float]) -> Any:
    rows = [(reward, turn == len(sample) - 1) for sample in samples for turn, reward in enumerate(sample)]
    return lazy_stack([TensorDict({"group_id": 3, "next": {"reward": [[r]], "done": [end]}}) for r, end in rows])


def test_a_group_whose_rewards_differ_has_a_signal() -> None:
    keeps = SignalFilter(4)
    assert [keeps(group(*rewards)) for rewards in ((0.0, 1.0), (1.0, 1.0), (0.5, 0.5, 0.4))] == [True, False, True]


def test_turns_are_summed_first() -> None:
    keeps = SignalFilter(4)
    assert not keeps(turns([0.0, 1.0], [0.0, 1.0])) and not keeps(turns([1.0, 0.0], [0.0, 1.0]))
    assert keeps(turns([1.0, 0.0], [1.0, 1.0]))


def test_many_in_a_row_are_logged_and_one_with_a_signal_ends_the_row(caplog: pytest.LogCaptureFixture) -> None:
    keeps = SignalFilter(1)
    for _ in range(9):
        keeps(group(1.0, 1.0))
    keeps(group(1.0, 0.0))
    for _ in range(9):
        keeps(group(1.0, 1.0))
    assert caplog.text == ""
    keeps(group(1.0, 1.0))
    assert "the last 10 groups were left out" in caplog.text


def test_it_runs_beside_and_is_waited_for() -> None:
    go_on = threading.Event()

    def evaluate() -> float:
        assert go_on.wait(60)
        return 0.75

    evaluation = Evaluation(evaluate)
    assert evaluation.end(0, True) == {}  # none was begun
    evaluation.begin()
    go_on.set()
    assert evaluation.end(3, True) == {"held_out_reward": 0.75}
    assert evaluation.end(4, True) == {}
    assert evaluation.scores == {3: 0.75}
    evaluation.close()


@pytest.mark.parametrize(("found", "newest"), [(0.5, False), (None, True)])
def test_only_what_is_of_the_newest_weights_judges_a_checkpoint(found: float | None, newest: bool) -> None:
    evaluation = Evaluation(lambda: found)
    evaluation.begin()
    assert evaluation.end(2, newest) == ({} if found is None else {"held_out_reward": found})
    assert evaluation.scores == {}
    evaluation.close()


def test_one_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def evaluate() -> float:
        raise ZeroDivisionError("no answers")

    evaluation = Evaluation(evaluate)
    evaluation.begin()
    assert evaluation.end(5, True) == {}
    assert "no evaluation at step 5: ZeroDivisionError('no answers')" in caplog.text
    evaluation.close()
    evaluation.close()
