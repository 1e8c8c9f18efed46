"""What is asked of an engine, when it is interrupted, and that it gets its own weights back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.conformance import shared_moe
from support.conforming_engine import QUICK, ConformingEngine
from support.faulty_engines import TOKEN_SECONDS
from torchrl_moe.testing.conformance import Answer, NotOffered, Sampling, check, interruptions
from torchrl_moe.testing.conformance.interruptions import crossed_by_update, cut_midway
from torchrl_moe.testing.conformance.judge import Reference
from torchrl_moe.testing.conformance.report import DoesNotHold
from torchrl_moe.testing.conformance.trial import Trial


def trial_of(engine: Any) -> Trial:
    return Trial(engine, Reference(shared_moe()), None, QUICK)


@pytest.fixture
def trial() -> Trial:
    return trial_of(ConformingEngine(shared_moe()))


class Silent(ConformingEngine):
    """Answers without a token, and says no more than that they are over."""

    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        nothing = Answer(token_ids=[], log_probs=[], versions=[], finish_reason="stop")
        return [[nothing] * sampling.n for _ in prompts]


def test_answers_without_a_token_prove_nothing() -> None:
    with pytest.raises(DoesNotHold, match="1 of 2 answers have no token"):
        trial_of(Partly(shared_moe())).ask([[1], [2]], Sampling(max_tokens=1))
    assert trial_of(Silent(shared_moe())).ask([[1]], Sampling(max_tokens=1), ["cut"])  # by an abort, perhaps
    names = ["log_probs[plain]", "versions", "update"]
    report = check(Silent(shared_moe()), shared_moe(), only=names, settings=QUICK)
    assert {one.verdict for one in report.results} == {"does not hold"}, report


class Partly(Silent):
    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        return [*super().generate(prompts[:1], sampling), *ConformingEngine.generate(self, prompts[1:], sampling)]


class Scripted:
    """Gives answers of so many tokens, whatever is done to them."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.aborted: list[str] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[list[Answer]]:
        count = self.tokens.pop(0) if request_ids else sampling.max_tokens
        reason = "length" if count == sampling.max_tokens else "abort"
        return [[Answer(token_ids=np.ones(count, np.int64), finish_reason=reason)]]

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited before each interruption; nobody waits."""
    seen: list[float] = []
    monkeypatch.setattr(interruptions, "wait", lambda futures, seconds: seen.append(seconds))
    return seen


def test_too_late_is_halved_and_too_early_is_more_until_it_is_given_up(delays: list[float]) -> None:
    engine = Scripted(24, 24, 0, 11)
    assert len(cut_midway(trial_of(engine)).tokens) == 11
    assert [delay / delays[0] for delay in delays] == pytest.approx([1, 0.5, 0.25, 0.45])
    assert engine.aborted == [f"conformance-cut-{attempt}" for attempt in range(4)]
    delays.clear()
    with pytest.raises(DoesNotHold, match=r"no abort cut an answer of 24 tokens midway: .* \[24, 24"):
        cut_midway(trial_of(Scripted(*[24] * 10)))
    assert len(delays) == 10


def test_an_answer_crosses_an_update_where_its_log_probs_change() -> None:
    trial = trial_of(ConformingEngine(shared_moe(), token_seconds=TOKEN_SECONDS))
    found = crossed_by_update(trial)
    labels = found.sampled.versions
    assert found.boundary == labels.count(labels[0]) < len(labels)
    assert found.versions == (labels[0], labels[-1])
    assert labels[0] < labels[-1]
    assert found.before.fitting(found.sampled) == found.boundary
    assert trial.serving is trial.judge.reference  # its own weights are back


class Cuts(ConformingEngine):
    """Ends answers before it takes weights."""

    updates = 0

    def update_weights(self, model: Any) -> None:
        self.updates += 1
        with self.changed:
            self.aborted.update(self.running)
            super().update_weights(model)


def test_an_engine_that_ends_answers_first_has_none_that_cross() -> None:
    engine = Cuts(shared_moe(), token_seconds=0.001)
    trial = trial_of(engine)
    with pytest.raises(NotOffered, match=r"no answer continued over a weight update; those .* ended with .*'abort'"):
        crossed_by_update(trial)
    assert engine.updates == 2  # the last one brings its own weights back
    assert trial.serving is trial.judge.reference


class Breaks(ConformingEngine):
    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        raise OSError("gone")


class Hangs(ConformingEngine):
    def abort(self, request_ids: Sequence[str]) -> None:
        self.pause("in_place")


def test_an_error_while_answers_are_asked_for_is_raised_and_one_that_never_ends_does_not_hold() -> None:
    trial = Trial(Hangs(shared_moe(), token_seconds=0.005), None, None, replace(QUICK, patience=0.3))
    with pytest.raises(DoesNotHold, match=r"the engine did not answer within 0\.3 s"):
        cut_midway(trial)
    trial.adapter.go_on()  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="gone"):
        crossed_by_update(trial_of(Breaks(shared_moe())))
