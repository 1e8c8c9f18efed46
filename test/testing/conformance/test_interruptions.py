"""Finding the moment to interrupt: by halves, later if it was too early, and no more often than needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.conformance import shared_moe
from support.conforming_engine import QUICK, ConformingEngine
from support.faulty_engines import TOKEN_SECONDS
from support.waiting import until
from torchrl_moe.testing.conformance import Answer, NotOffered, Sampling, interruptions
from torchrl_moe.testing.conformance.interruptions import crossed_by_update, cut_midway
from torchrl_moe.testing.conformance.reference import Reference
from torchrl_moe.testing.conformance.report import DoesNotHold
from torchrl_moe.testing.conformance.trial import Trial


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


def trial_of(engine: Any) -> Trial:
    return Trial(engine, Reference(shared_moe()), None, QUICK)


def test_too_late_is_halved_and_too_early_is_more(delays: list[float]) -> None:
    engine = Scripted(24, 24, 0, 11)
    assert len(cut_midway(trial_of(engine)).tokens) == 11
    assert [delay / delays[0] for delay in delays] == pytest.approx([1, 0.5, 0.25, 0.45])
    assert engine.aborted == [f"conformance-cut-{attempt}" for attempt in range(4)]


def test_an_abort_that_never_cuts_does_not_hold(delays: list[float]) -> None:
    with pytest.raises(DoesNotHold, match=r"no abort cut an answer of 24 tokens midway: .* \[24, 24"):
        cut_midway(trial_of(Scripted(*[24] * 10)))
    assert len(delays) == 10


class Fixed:
    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        return []


def test_what_has_no_abort_or_update_is_not_asked() -> None:
    with pytest.raises(NotOffered, match=r"no abort\(request_ids\)"):
        cut_midway(trial_of(Fixed()))
    with pytest.raises(NotOffered, match=r"no update_weights\(model\)"):
        crossed_by_update(trial_of(Fixed()))


def test_an_answer_crosses_an_update_where_its_log_probs_change() -> None:
    trial = trial_of(ConformingEngine(shared_moe(), token_seconds=TOKEN_SECONDS))
    found = crossed_by_update(trial)
    labels = found.sampled.versions
    assert found.boundary == labels.count(labels[0]) < len(labels)
    assert found.versions == (labels[0], labels[-1])
    assert labels[0] < labels[-1]
    assert found.before.fitting(found.sampled) == found.boundary
    assert trial.serving is trial.judge.reference  # its own weights are back


class Drains(ConformingEngine):
    """Lets answers end before it takes weights."""

    updates = 0

    def update_weights(self, model: Any) -> None:
        self.updates += 1
        self.is_draining = True
        until(lambda: not self.running)
        super().update_weights(model)
        self.is_draining = False

    is_draining = False

    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        until(lambda: not self.is_draining)
        return super().generate(prompts, sampling, request_ids)


class Cuts(ConformingEngine):
    """Ends answers before it takes weights."""

    updates = 0

    def update_weights(self, model: Any) -> None:
        self.updates += 1
        with self.changed:
            self.aborted.update(self.running)
            super().update_weights(model)


@pytest.mark.parametrize(("kind", "reason", "updates"), [(Drains, "'length'", 8), (Cuts, "'abort'", 2)])
def test_an_engine_that_ends_answers_first_has_none_that_cross(kind: Any, reason: str, updates: int) -> None:
    engine = kind(shared_moe(), token_seconds=0.001)
    trial = trial_of(engine)
    with pytest.raises(NotOffered, match=f"no answer continued over a weight update; those .* ended with .*{reason}"):
        crossed_by_update(trial)
    assert engine.updates == updates  # the last one brings its own weights back
    assert trial.serving is trial.judge.reference


class Breaks(ConformingEngine):
    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        raise OSError("gone")


def test_an_error_while_answers_are_asked_for_is_raised() -> None:
    with pytest.raises(OSError, match="gone"):
        crossed_by_update(trial_of(Breaks(shared_moe())))


class Hangs(ConformingEngine):
    def abort(self, request_ids: Sequence[str]) -> None:
        self.pause("in_place")


def test_an_answer_that_never_ends_does_not_hold() -> None:
    trial = Trial(Hangs(shared_moe(), token_seconds=0.005), None, None, replace(QUICK, patience=0.3))
    with pytest.raises(DoesNotHold, match=r"the engine did not answer within 0\.3 s"):
        cut_midway(trial)
    trial.adapter.go_on()  # type: ignore[attr-defined]
