"""All checks: an engine without a fault holds, each check sees each fault, and what an adapter may do wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.conformance import result, shared_moe
from support.conforming_engine import QUICK, ConformingEngine
from support.faulty_engines import FAULTS, TOKEN_SECONDS
from torchrl_moe.modules.replay import router_replay as handles
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.conformance import CHECKS, Answer, NotOffered, Sampling, check


def test_an_engine_that_is_right_holds_in_all() -> None:
    engine = ConformingEngine(shared_moe(), token_seconds=TOKEN_SECONDS)
    report = check(engine, shared_moe(), settings=QUICK)
    assert [one.text for one in report.results if not one.holds] == []
    assert [one.name for one in report.results] == [one.name for one in CHECKS]
    assert report.engine == "conforming"
    state = shared_moe().state_dict()
    assert all(value.equal(state[name]) for name, value in engine.model.state_dict().items())


def test_each_check_has_a_fault_a_meaning_and_advice() -> None:
    assert set(FAULTS) == {one.name for one in CHECKS}
    assert len(FAULTS) == len(CHECKS) and all(FAULTS.values())
    assert all(one.meaning and one.advice and not one.advice.endswith(".") for one in CHECKS)
    assert next(one for one in CHECKS if one.name == "rows").meaning == "one row for each token but the last"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=[pytest.mark.parity] if number else [])  # one of each in `make test`
        for name, faults in FAULTS.items()
        for number, fault in enumerate(faults)
    ],
)
def test_each_check_sees_each_engine_with_its_fault(name: str, fault: str) -> None:
    found = result(name, FAULTS[name][fault](shared_moe()))
    assert found.verdict == "does not hold", found.text
    assert found.off is None or found.off > found.allowed  # type: ignore[operator]
    assert found.advice


class Adapter:
    """Answers by a function of the prompt; no name, and nothing else."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def generate(self, prompts: Any, sampling: Any, request_ids: Any = None) -> Any:
        return [[self.make(prompt)] * sampling.n for prompt in prompts]


def test_an_adapter_with_tokens_alone_is_offered_nothing_and_passes_nothing() -> None:
    report = check(Adapter(lambda prompt: Answer(token_ids=[3, 4])), shared_moe(), settings=QUICK)
    assert {one.verdict for one in report.results} == {"not offered"}
    assert report.engine == "Adapter"
    assert {one.seen for one in report.results} == {
        "answers have no routed_experts",
        "answers have no log-probs",
        "no prefix was cached: num_cached_tokens is None when a prompt comes again",
        "answers have no versions",
        "the adapter has no abort(request_ids)",
        "the adapter has no resume(prompt, answer, sampling)",
        "the adapter has no update_weights(model)",
    }


@pytest.mark.parametrize(
    ("error", "verdict", "seen"),
    [
        (OSError("no route to host"), "does not hold", "OSError: no route to host"),
        (NotOffered("no such engine here"), "not offered", "no such engine here"),
    ],
)
def test_an_error_of_an_adapter_is_what_was_seen_of_it(error: Exception, verdict: str, seen: str) -> None:
    def fail(prompt: Any) -> Any:
        raise error

    report = check(Adapter(fail), shared_moe(), only=["rows", "log_probs[top_p]"], settings=QUICK)
    assert [(one.verdict, one.seen, one.off) for one in report.results] == [(verdict, seen, None)] * 2
    dense = make_tiny_moe("qwen3", num_hidden_layers=1)  # it has no routes to check
    answer = Answer(token_ids=[3], routed_experts=np.zeros((1, 1, 1), np.int8))
    report = check(Adapter(lambda prompt: answer), dense, only=["rows"], settings=QUICK)
    assert "pass model= or layout=" in report["rows"].seen


def test_a_model_may_be_a_folder_and_only_some_checks_may_run(tmp_path: Path) -> None:
    shared_moe().save_pretrained(tmp_path)
    names = ["log_probs[plain]", "native_routes", "rows"]
    report = check(ConformingEngine(shared_moe()), tmp_path, only=names, settings=QUICK)
    assert {one.name: one.holds for one in report.results} == dict.fromkeys(names, True)
    assert report.results[0].name == "rows"
    with pytest.raises(ValueError, match=r"no checks \['row'\]; there are \['rows', "):
        check(ConformingEngine(shared_moe()), shared_moe(), only=["row"])


class BreaksAtUpdates(ConformingEngine):
    """Takes one update, and no other."""

    def update_weights(self, model: Any) -> None:
        if self.version:
            raise OSError("the engine is gone")
        super().update_weights(model)


def test_an_engine_that_cannot_be_given_its_weights_back_has_a_report() -> None:
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=2).train()
    report = check(BreaksAtUpdates(model), model, only=["values", "update"], settings=QUICK)
    assert [(one.name, one.verdict) for one in report.results] == [
        ("values", "holds"),
        ("update", "does not hold"),
        ("own weights", "does not hold"),
    ]
    assert report["own weights"].seen == "OSError: the engine is gone"
    assert "restart it" in report["own weights"].advice
    assert handles.owner_of(model) is None
    assert model.training

    def interrupt(prompt: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(Adapter(interrupt), model, only=["rows"])
    assert handles.owner_of(model) is None
    assert model.training


class Reorders(ConformingEngine):
    """Names the same experts in another order when an answer continued."""

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        whole = super().resume(prompt, answer, sampling)
        return replace(whole, routed_experts=whole.routed_experts[..., ::-1])


def test_the_order_of_experts_is_no_change() -> None:
    found = result("resume", Reorders(shared_moe(), token_seconds=TOKEN_SECONDS))
    assert found.holds, found.text


def test_an_update_that_tolerances_cannot_see_proves_nothing() -> None:
    """An engine that keeps its weights would hold."""
    settings = replace(QUICK, tolerance=10.0)
    found = check(
        FAULTS["update"]["none of the weights"](shared_moe()), shared_moe(), only=["update"], settings=settings
    )
    assert found["update"].verdict == "not offered"
    assert "other weights hardly change this model's log-probs" in found["update"].seen
