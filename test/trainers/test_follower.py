"""What other ranks have in the place of rank 0's parts; runs of both are in test_run_on_ranks.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from support.training import fake_config, fake_model
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.trainers.config import ModelConfig
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.ranks import Ranks, pack
from torchrl_moe.trainers.roles import Follower
from torchrl_moe.trainers.rollout_engine import Given


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
    assert [int(share["a"]) for share in rollouts] == [1, 2]
    assert ranks.phases == [("rollouts", True)] * 3
    rollouts.shutdown()


def test_it_reads_no_data_writes_nothing_and_evaluates_nothing(tmp_path: Path) -> None:
    config = fake_config(tmp_path / "run", 2)
    config.eval.every, config.log.samples, config.log.progress, config.log.loggers = 3, 2, True, ["csv"]
    follower = Follower(config, Second())
    assert (config.eval.every, config.log.samples, config.log.progress) == (0, 0, False)
    assert follower.loggers() == []
    source = follower.source(None, Given(dataset="no/such/file.jsonl"))
    assert source.evaluate(None) is None  # type: ignore[arg-type]
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
