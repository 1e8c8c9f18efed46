"""What new weights are asked, and which answers are good."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from support.llm import FakeLLM
from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.vllm import weight_check
from torchrl_moe.modules.backends.vllm.weight_check import WeightCheck, is_weight_check

CANARY = {"token_ids": [5, 6, 7], "log_probs": [-1.0, -2.0], "tolerance": 1e-3}


def ask(engine: FakeLLM, canary: Any = None, seconds: float = 60.0) -> str:
    return asyncio.run(WeightCheck(engine, canary, "probe-3").ask(seconds))


def test_without_a_canary_one_token_is_asked_for_and_no_log_prob_of_the_prompt() -> None:
    engine = FakeLLM()
    ask(engine)
    prompt, params, name = engine.prompts[0]
    assert (prompt, name) == ({"prompt_token_ids": [0], "cache_salt": "probe-3"}, "probe-3")
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (1, 0, None)
    assert is_weight_check(params)
    params.max_tokens = 2  # then it would have steps of its own for as long as it likes
    assert not is_weight_check(params)


def test_requests_of_users_are_no_canaries() -> None:
    from vllm import SamplingParams

    assert not is_weight_check(None)
    assert not is_weight_check(SamplingParams(max_tokens=1))
    assert not is_weight_check(SamplingParams(max_tokens=1, extra_args={"torchrl_moe": {"live": True}}))


def test_what_was_sent_is_not_sent_again() -> None:
    engine = FakeLLM()

    async def send_and_ask() -> str:
        canary = WeightCheck(engine, None, "probe-3")
        await canary.send()
        assert engine.log == ["probe"]
        return await canary.ask(60.0)

    assert asyncio.run(send_and_ask()) == ""
    assert engine.log == ["probe"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("canary", [None, CANARY])
def test_a_token_whose_log_prob_is_no_number_is_wrong(bad: float, canary: Any) -> None:
    with pytest.raises(WeightSyncError, match="the new weights give a log-prob that is not a number"):
        ask(FakeLLM(logprob=bad), canary)


def test_a_canary_is_asked_for_the_log_probs_of_its_own_prompt() -> None:
    engine = FakeLLM(prompt_logprobs=(-1.0005, -1.9995))
    ask(engine, CANARY)
    prompt, params, _ = engine.prompts[0]
    assert prompt["prompt_token_ids"] == [5, 6, 7]
    assert params.prompt_logprobs == 0
    with pytest.raises(WeightSyncError, match=r"by up to 2.0e-03 \(at token 2: -2.002 and -2\), allowed: 1.0e-03"):
        ask(FakeLLM(prompt_logprobs=(-1.0015, -2.002)), CANARY)


def test_as_many_log_probs_as_tokens_but_the_first() -> None:
    with pytest.raises(WeightSyncError, match="the canary has 3 log-probs for a prompt of 3 tokens"):
        ask(FakeLLM(), {**CANARY, "log_probs": [-1.0, -2.0, -3.0]})


def test_a_question_behind_a_long_queue_is_let_go_and_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_check, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(weight_check, "PROOF_SECONDS", 0.02)
    engine = FakeLLM()
    assert ask(engine) == ask(engine, CANARY) == ""
    engine.hangs = True
    assert ask(engine) == "the check of the new weights had no turn within 0.01 s"
    assert ask(engine, CANARY) == "the check of the new weights had no turn within 0.02 s"
    assert ask(engine, CANARY, seconds=0.005) == "the check of the new weights had no turn within 0.005 s"
    assert engine.log[-2:] == ["probe", ("abort", ["probe-3"])]


def test_what_the_engine_refuses_is_raised() -> None:
    engine = FakeLLM()
    engine.fail["probe"] = ValueError("the prompt is too long")
    with pytest.raises(ValueError, match="too long"):
        ask(engine, CANARY)
