"""What a run shows is tried where runs are, in test_grpo_trainer; here: a run without a step, and with odd names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.html_table import TableReader
from torchrl_moe.trainers.config import GRPOConfig
from torchrl_moe.trainers.run_record import RunReports


class Run(RunReports):
    def __init__(self, *rows: dict[str, Any], out: str = "runs/a") -> None:
        self.record: Any = SimpleNamespace(rows=rows)
        self.config = GRPOConfig(out=out)
        self.policy_model: Any = SimpleNamespace(model=object())
        self.steps_done = len(rows)
        self.shown: list[Any] = []
        self.collector = SimpleNamespace(show_samples=lambda *args, **kwargs: self.shown.append((args, kwargs)))

    def evaluate(self) -> float | None:
        raise AssertionError("nothing to evaluate")


def test_a_run_without_a_step_has_nothing_to_sum_up() -> None:
    with pytest.raises(RuntimeError, match="no step has run"):
        Run().summary()


def test_in_a_notebook_the_last_step_is_a_table() -> None:
    html = Run({"step": 0, "reward": 0.1}, {"step": 1, "reward": 0.51239, "empty": ""}, out="<script>1</script>")
    read = TableReader(html._repr_html_())
    assert read.rows["tbody"] == [["step", "1"], ["reward", "0.5124"]]
    assert "<script>1</script>" in read.other[0] and "<script" not in html._repr_html_()
    assert TableReader(Run()._repr_html_()).other[-1] == "no step yet"


def test_samples_are_the_collectors() -> None:
    run = Run()
    run.show_samples(2, color="experts", layer=1)
    assert run.shown == [((2, 160), {"color": "experts", "layer": 1})]
