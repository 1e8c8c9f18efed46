"""What collects samples for a run, what it reads of them, and what evaluates beside it."""

from __future__ import annotations

import threading
from typing import Any

from pytest import LogCaptureFixture
from tensordict import TensorDict, lazy_stack

from torchrl_moe.trainers.samples import Evaluation, SignalFilter


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


def test_many_without_one_in_a_row_are_logged(caplog: LogCaptureFixture) -> None:
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
