"""Each check sees each engine with its fault. That it holds for one without: ``test_checks.py``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from support.conformance import faults_of, result, shared_moe
from support.conforming_engine import QUICK, ConformingEngine
from support.faulty_engines import FAULTS, TOKEN_SECONDS
from torchrl_moe.testing.conformance import Answer, Sampling, check

NAMES = ("abort", "resume", "resumed_tail")


@faults_of(NAMES)
def test_it_sees_the_fault(name: str, fault: str) -> None:
    found = result(name, FAULTS[name][fault](shared_moe()))
    assert found.verdict == "does not hold", found.text
    assert found.off is None or found.off > found.allowed  # type: ignore[operator]
    assert found.advice


class Reorders(ConformingEngine):
    """Names the same experts in another order when an answer continued."""

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        whole = super().resume(prompt, answer, sampling)
        return replace(whole, routed_experts=whole.routed_experts[..., ::-1])


def test_the_order_of_experts_is_no_change() -> None:
    found = result("resume", Reorders(shared_moe(), token_seconds=TOKEN_SECONDS))
    assert found.holds, found.text


class NeverGoesOn:
    """Cuts at once, and hangs when it is to continue."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def generate(self, prompts: Any, sampling: Sampling, request_ids: Any = None) -> list[list[Answer]]:
        return [[Answer(token_ids=[1, 2], finish_reason="abort")]]

    def abort(self, request_ids: Sequence[str]) -> None:
        pass

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        self.over.wait(60.0)
        return answer


def test_an_answer_that_never_continues_does_not_hold() -> None:
    engine, settings = NeverGoesOn(), replace(QUICK, patience=2.0)
    found = check(engine, shared_moe(), only=["resume"], settings=settings)["resume"]
    engine.over.set()
    assert (found.verdict, found.seen) == ("does not hold", "the engine did not answer within 2 s")
