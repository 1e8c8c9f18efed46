"""What a wrapper asks sample by sample is what its forward asks for a batch."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import FakeAsyncVLLM

PROMPTS = ([72, 101], [108, 108, 111])


def batch() -> TensorDict:
    rows = [
        TensorDict(tokens=TensorDict(prompt=torch.tensor(ids)), session_id=f"s{i}", priority=torch.tensor(i))
        for i, ids in enumerate(PROMPTS)
    ]
    return lazy_stack(rows)


def test_answers_asked_for_one_by_one_are_those_of_forward() -> None:
    with FakeAsyncVLLM() as engine:
        policy = vLLMWrapper(engine, input_mode="tokens", generate_kwargs={"max_new_tokens": 5})
        expected = policy(batch())
        for request, row in zip(policy.requests(batch()), expected.unbind(0), strict=True):
            answer = policy.answer(request, asyncio.run(engine.agenerate(**request.arguments)))
            for key in (("tokens", "full"), ("routed_experts", "full"), ("masks", "all_assistant_mask")):
                assert torch.equal(answer[key], row[key])
            assert torch.equal(answer["log_probs", "response"], row["log_probs", "response"])


def test_a_request_carries_its_own_prompt_and_what_the_batch_says_of_it() -> None:
    with FakeAsyncVLLM() as engine:
        policy = vLLMWrapper(engine, input_mode="tokens", timeout_seconds=9.0)
        first, second = policy.requests(batch(), max_new_tokens=3, return_routed_experts=False)
    assert [list(request.arguments["prompt_token_ids"]) for request in (first, second)] == list(PROMPTS)
    assert (second.arguments["session_id"], second.arguments["priority"]) == ("s1", 1)
    assert second.arguments["sampling_params"]["max_tokens"] == 3
    assert second.arguments["timeout_seconds"] == 9.0
    assert not second.arguments["return_routed_experts"]
    assert second.keys.routed_experts is None
    assert (first.index, second.index) == (0, 1)


def test_several_samples_of_a_prompt_are_refused() -> None:
    with FakeAsyncVLLM() as engine:
        policy = vLLMWrapper(engine, input_mode="tokens", num_samples=2)
        with pytest.raises(ValueError, match="one answer per sample, but num_samples=2"):
            policy.requests(batch())
