"""Figures and verdicts, from log-probs made up so that they can be worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from torchrl_moe.cli.probe_result import Figures, ProbeResult
from torchrl_moe.objectives import MismatchMetrics


def metrics(gaps: list[float], agreement: list[float] | None = None) -> MismatchMetrics:
    """Of one sequence: a prompt token, and one that was sampled for each gap, trainer less engine."""
    tokens = len(gaps) + 1
    td = TensorDict(
        {
            ("tokens", "full"): torch.arange(tokens)[None],
            ("log_probs", "full"): torch.tensor([[math.nan, *[-1.0] * len(gaps)]]),
            ("masks", "all_attention_mask"): torch.ones(1, tokens, dtype=torch.bool),
        },
        [1],
    )
    if agreement is not None:
        td["routing", "agreement"] = torch.tensor([agreement])
        td["routing", "fallback"] = torch.tensor([1])
    found = MismatchMetrics(masking_strategy="generic", thresholds=None)
    found.update(td, torch.tensor([[0.0, *[gap - 1.0 for gap in gaps]]]))
    return found


def result(live: list[float], replayed: list[float], agreement: list[float] | None = None) -> ProbeResult:
    return ProbeResult.of("a model", metrics(replayed, agreement or [math.nan, 0.75, 1.0]), metrics(live))


def test_figures_are_those_of_the_sampled_tokens() -> None:
    found = Figures.of(metrics([0.1, -0.3, 0.2, 0.0]))
    assert found.mean == pytest.approx(0.15)
    assert found.median == pytest.approx(0.15)
    assert found.maximum == pytest.approx(0.3)
    assert found.k1 == pytest.approx(0.0, abs=1e-7)
    k3 = sum(math.exp(gap) - 1 - gap for gap in (0.1, -0.3, 0.2, 0.0)) / 4
    assert found.k3 == pytest.approx(k3, rel=1e-4)


def test_layers_and_what_replay_removes() -> None:
    found = result([0.1, -0.1], [0.05, -0.05])
    assert found.tokens == 2
    assert found.agreement == {1: pytest.approx(0.75), 2: pytest.approx(1.0)}
    assert found.mean_agreement == pytest.approx(0.875)
    assert found.removed == pytest.approx(0.5, rel=1e-5)
    assert found.problems == []
    assert found.verdict.startswith("R3 helps: it removes 50% of the mismatch (mean |Δ log-prob| 1.0e-01 -> 5.0e-02)")
    assert found.verdict.endswith("chooses other experts in 12.5% of rows.")


@pytest.mark.parametrize(
    ("live", "replayed", "begins"),
    [
        ([2e-6, -2e-6], [1e-6, -1e-6], "Nothing to remove: engine and trainer compute the same function"),
        ([0.1, -0.1], [0.099, -0.1], "R3 makes little difference here"),
        ([0.05, -0.05], [0.1, -0.1], "R3 does not help here: the mismatch grows by 100%"),
        ([0.1, -0.1], [1.5, -1.5], "Even with replay, engine and trainer are far apart (KL (k3) "),
    ],
)
def test_the_verdict(live: list[float], replayed: list[float], begins: str) -> None:
    assert result(live, replayed).verdict.startswith(begins)


def test_a_mismatch_that_is_left_over_is_a_problem() -> None:
    found = result([0.1, -0.1], [3.0, -3.0])
    assert len(found.problems) == 2  # the two ratios, e^3 and e^-3: ess (e^3 + e^-3)^2 / 2 (e^6 + e^-6) = 0.505
    assert found.problems[1] == "100% of ratios beyond 2, at most 10%"
    skewed = result([0.1] * 4, [4.0, -0.1, -0.1, -0.1])
    assert any(problem.startswith("effective sample size 0.2") for problem in skewed.problems)


def test_text_and_data_say_the_same() -> None:
    found = result([0.1, -0.1], [0.05, -0.05])
    lines = found.text().splitlines()
    assert lines[0] == "a model; 2 tokens"
    assert [cell for cell in lines[2].split() if "e-" in cell] == ["1.0e-01", "5.0e-02"]
    assert any(line.split() == ["1", "75.00%", "#" * 25] for line in lines)
    data: dict[str, Any] = json.loads(json.dumps(found.to_dict()))
    assert data["agreement"]["layers"] == {"1": 0.75, "2": 1.0}
    assert (data["tokens"], data["verdict"]) == (2, found.verdict)


def test_without_a_token_there_is_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="no tokens to compare"):
        result([], [])
