"""An evaluation beside a step: what it finds, whose weights it is of, and what it costs if it fails."""

from __future__ import annotations

import threading

import pytest

from torchrl_moe.trainers.roles import Evaluation


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
