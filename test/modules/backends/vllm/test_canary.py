"""What new weights are asked, and which answers are good."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe._errors import WeightSyncError
from torchrl_moe.modules.backends.vllm import canary as canary_module
from torchrl_moe.modules.backends.vllm.canary import ask_canary, compare_log_probs

CANARY = {"token_ids": [5, 6, 7], "log_probs": [-1.0, -2.0], "tolerance": 1e-3}


class Engine:
    """Gives one token the log-prob ``first``, and the prompt's tokens from the second on ``prompt``."""

    def __init__(self, first: float = -1.0, prompt: tuple[float, ...] = (-1.0, -2.0)) -> None:
        self.first, self.prompt = first, prompt
        self.asked: list[Any] = []
        self.hang = False

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.asked.append((prompt, params, request_id))
        if self.hang:
            await asyncio.Event().wait()
        tokens = prompt["prompt_token_ids"][1:]
        rows = [{token: SimpleNamespace(logprob=value)} for token, value in zip(tokens, self.prompt, strict=False)]
        output = SimpleNamespace(logprobs=[{9: SimpleNamespace(logprob=self.first)}])
        yield SimpleNamespace(
            outputs=[output], prompt_logprobs=None if params.prompt_logprobs is None else [None, *rows]
        )


def ask(engine: Engine, canary: Any = None, seconds: float = 60.0) -> str:
    return asyncio.run(ask_canary(engine, canary, "probe-3", seconds))


def test_without_a_canary_one_token_is_asked_for_and_no_log_prob_of_the_prompt() -> None:
    engine = Engine()
    ask(engine)
    prompt, params, name = engine.asked[0]
    assert (prompt, name) == ({"prompt_token_ids": [0], "cache_salt": "probe-3"}, "probe-3")
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (1, 0, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("canary", [None, CANARY])
def test_a_token_whose_log_prob_is_no_number_is_wrong(bad: float, canary: Any) -> None:
    with pytest.raises(WeightSyncError, match="the new weights give a log-prob that is not a number"):
        ask(Engine(first=bad), canary)


def test_a_canary_is_asked_for_the_log_probs_of_its_own_prompt() -> None:
    engine = Engine(prompt=(-1.0005, -1.9995))
    ask(engine, CANARY)
    prompt, params, _ = engine.asked[0]
    assert prompt["prompt_token_ids"] == [5, 6, 7]
    assert params.prompt_logprobs == 0
    with pytest.raises(WeightSyncError, match=r"by up to 2.0e-03 \(at token 2: -2.002 and -2\), allowed: 1.0e-03"):
        ask(Engine(prompt=(-1.0015, -2.002)), CANARY)


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([-1.5, -2.25], r"up to 5.0e-01 \(at token 1: -1.5 and -1\)"),
        ([-1.5, math.nan], r"up to nan \(at token 2: nan and -2\)"),
        ([math.inf, -2.0], r"up to inf \(at token 1"),
    ],
)
def test_the_largest_difference_is_named(got: list[float], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        compare_log_probs(got, [-1.0, -2.0], 1e-3)


def test_a_difference_may_be_as_large_as_the_tolerance() -> None:
    compare_log_probs([-1.25], [-1.0], 0.25)
    compare_log_probs([], [], 0.0)


def test_as_many_log_probs_as_tokens_but_the_first() -> None:
    with pytest.raises(WeightSyncError, match="the canary has 3 log-probs for a prompt of 3 tokens"):
        ask(Engine(), {**CANARY, "log_probs": [-1.0, -2.0, -3.0]})


def test_a_question_behind_a_long_queue_is_let_go_and_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_module, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(canary_module, "PROOF_SECONDS", 0.02)
    engine = Engine()
    assert ask(engine) == ask(engine, CANARY) == ""
    engine.hang = True
    assert ask(engine) == "the canary had no turn within 0.01 s"
    assert ask(engine, CANARY) == "the canary had no turn within 0.02 s"
    assert ask(engine, CANARY, seconds=0.005) == "the canary had no turn within 0.005 s"


def test_what_the_engine_refuses_is_raised() -> None:
    class Refusing(Engine):
        async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
            raise ValueError("the prompt is too long")
            yield

    with pytest.raises(ValueError, match="too long"):
        ask(Refusing(), CANARY)
