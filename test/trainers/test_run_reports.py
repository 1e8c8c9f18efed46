"""What a run shows is tried where runs are, in test_grpo_trainer; here: a run without a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe.trainers.run_reports import RunReports


class Fresh(RunReports):
    def __init__(self) -> None:
        self.record: Any = SimpleNamespace(rows=[])

    def evaluate(self) -> float | None:
        raise AssertionError("nothing to evaluate")


def test_a_run_without_a_step_has_nothing_to_sum_up() -> None:
    with pytest.raises(RuntimeError, match="no step was made"):
        Fresh().summary()
