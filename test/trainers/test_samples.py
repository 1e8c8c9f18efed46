"""What collects samples for a run, what it reads of them, and what evaluates beside it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict, lazy_stack

from support.training import fake_config, fake_model
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.trainers.config import ModelConfig
from torchrl_moe.trainers.policy_model import PolicyModel, RolloutEngine
from torchrl_moe.trainers.samples import Evaluation, SignalFilter
from torchrl_moe.weight_update.report import SyncReport


def test_another_rank_sends_its_part_of_the_weights_and_has_no_engine(tmp_path: Path) -> None:
    policy_model = PolicyModel.load(fake_model(), ByteTokenizer(), ModelConfig())
    engine = RolloutEngine(policy_model, fake_config(tmp_path, 2), tmp_path, is_first=False)
    sent: list[str] = []

    def update() -> SyncReport:
        sent.append("weights")
        return SyncReport(version=1, nbytes=0, digest="", published=0.0)

    engine.sender.update_weights = update  # type: ignore[method-assign]
    engine.sync()
    engine.restore(5)
    assert sent == ["weights", "weights"] and engine.policy is None and not engine.owns_engine
    engine.shutdown()
    engine.shutdown()


def group(*rewards: float) -> Any:
    return turns(*([reward] for reward in rewards))


def turns(*samples: list[float]) -> Any:
    rows = [(reward, turn == len(sample) - 1) for sample in samples for turn, reward in enumerate(sample)]
    ids = {"tokens": {"full": [1, 2], "response": [2]}, "policy_versions": {"full": [-1, 0]}}
    return lazy_stack([TensorDict({"group_id": 3, "next": {"reward": [[r]], "done": [end]}, **ids}) for r, end in rows])


def test_a_group_whose_samples_rewards_differ_has_a_signal() -> None:
    keeps = SignalFilter(4)
    assert [keeps(group(*rewards)) for rewards in ((0.0, 1.0), (1.0, 1.0), (0.5, 0.5, 0.4))] == [True, False, True]
    # turns are summed first
    assert not keeps(turns([0.0, 1.0], [0.0, 1.0])) and not keeps(turns([1.0, 0.0], [0.0, 1.0]))
    assert keeps(turns([1.0, 0.0], [1.0, 1.0]))


def test_many_without_one_in_a_row_are_logged_and_one_with_a_signal_ends_the_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeps, uniform = SignalFilter(1), group(1.0, 1.0)
    for one in (*[uniform] * 9, group(1.0, 0.0), *[uniform] * 9):
        keeps(one)
    assert caplog.text == ""
    keeps(uniform)
    assert "the last 10 groups were left out" in caplog.text


def test_it_runs_beside_and_is_waited_for() -> None:
    go_on = threading.Event()

    def evaluate() -> float:
        assert go_on.wait(60)
        return 0.75

    evaluation = Evaluation(evaluate, 3)
    evaluation.begin(2, True)
    assert evaluation.take() == {}  # none was due
    evaluation.begin(3, True)
    go_on.set()
    assert evaluation.take() == {"held_out_reward": 0.75}
    evaluation.begin(3, True)
    assert evaluation.take() == {}  # once for each step
    assert evaluation.scores == {3: 0.75}
    evaluation.begin(4, True, is_last=True)
    evaluation.wait()
    assert evaluation.take() == {"held_out_reward": 0.75} and evaluation.scores == {3: 0.75, 4: 0.75}
    evaluation.close()


@pytest.mark.parametrize(("found", "newest"), [(0.5, False), (None, True)])
def test_only_what_is_of_the_newest_weights_judges_a_checkpoint(found: float | None, newest: bool) -> None:
    evaluation = Evaluation(lambda: found, 1)
    evaluation.begin(2, newest)
    assert evaluation.take() == ({} if found is None else {"held_out_reward": found})
    assert evaluation.scores == {}
    evaluation.close()


def test_one_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def evaluate() -> float:
        raise ZeroDivisionError("no answers")

    evaluation = Evaluation(evaluate, 5)
    evaluation.begin(5, True)
    assert evaluation.take() == {}
    assert "no evaluation at step 5: ZeroDivisionError('no answers')" in caplog.text
    evaluation.close()
    evaluation.close()
