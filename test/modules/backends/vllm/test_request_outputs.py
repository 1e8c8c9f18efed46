"""Our completions as vLLM's own objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.backends.vllm.request_outputs import generate_request_outputs, request_output

vllm = pytest.importorskip("vllm")
ROUTES = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)


def completion(name: str = "r", answers: int = 1, log_probs: Any = (-0.5, -1.25)) -> Completion:
    outputs = [
        CompletionOutput(
            index=index,
            token_ids=np.array([7, 8], np.int64),
            text="ab",
            finish_reason="stop",
            stop_reason=8,
            policy_versions=np.zeros(2, np.int32),
            logprobs=None if log_probs is None else np.array(log_probs, np.float32),
            routed_experts=ROUTES,
        )
        for index in range(answers)
    ]
    ids = np.array([104, 105, 33], np.int64)
    return Completion(request_id=name, prompt="hi!", prompt_token_ids=ids, num_cached_tokens=2, outputs=outputs)


class Engine:
    """Answers with made-up completions, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any, dict[str, Any]]] = []
        self.scored: list[tuple[Any, dict[str, Any]]] = []

    def generate(self, prompts: Any, params: Any, **kwargs: Any) -> Any:
        self.asked.append((prompts, params, kwargs))
        return [completion(one) for one in prompts] if isinstance(prompts, list) else completion(prompts)

    def score(self, tokens: Any, **kwargs: Any) -> list[torch.Tensor]:
        self.scored.append((tokens, kwargs))
        return [torch.tensor([float("nan"), -2.0, -4.0]) for _ in tokens]


def test_every_field_has_vllms_form() -> None:
    found = request_output(completion(answers=2), torch.tensor([float("nan"), -2.0, -4.0]))
    assert isinstance(found, vllm.RequestOutput)
    assert (found.request_id, found.prompt, found.prompt_token_ids) == ("r", "hi!", [104, 105, 33])
    assert (found.finished, found.num_cached_tokens) == (True, 2)
    first, *others = found.prompt_logprobs
    assert first is None
    assert [{token: one.logprob for token, one in entry.items()} for entry in others] == [{105: -2.0}, {33: -4.0}]
    assert [output.index for output in found.outputs] == [0, 1]
    output = found.outputs[1]
    assert isinstance(output, vllm.CompletionOutput)
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("ab", [7, 8], "stop", 8)
    assert [{token: one.logprob for token, one in entry.items()} for entry in output.logprobs] == [
        {7: -0.5},
        {8: -1.25},
    ]
    assert output.cumulative_logprob == -1.75
    assert output.routed_experts is ROUTES


def test_what_was_not_asked_for_is_none() -> None:
    found = request_output(completion(log_probs=None))
    assert found.prompt_logprobs is None
    assert (found.outputs[0].logprobs, found.outputs[0].cumulative_logprob) == (None, None)


def test_log_probs_of_the_tokens_themselves_are_asked_for_and_no_others() -> None:
    engine = Engine()
    given = vllm.SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1)
    one, two = generate_request_outputs(engine, ["a", "b"], given, actor_index=1, timeout_seconds=3.0, priority=2)
    (prompts, params, kwargs) = engine.asked[0]
    assert (prompts, params.max_tokens, params.logprobs, params.prompt_logprobs) == (["a", "b"], 2, 0, None)
    assert kwargs == {"use_tqdm": False, "actor_index": 1, "timeout_seconds": 3.0, "priority": 2}
    assert engine.scored == [([[104, 105, 33]] * 2, {"actor_index": 1, "timeout_seconds": 3.0})]
    assert (given.logprobs, given.prompt_logprobs) == (1, 1)  # the user's own stay as they are
    assert [found.request_id for found in (one, two)] == ["a", "b"]
    assert one.prompt_logprobs[1][105].logprob == -2.0


@pytest.mark.parametrize(
    ("given", "log_probs", "of_prompt"),
    [({}, None, None), ({"logprobs": 0}, 0, None), ({"logprobs": 5, "prompt_logprobs": 5}, 5, 5)],
    ids=str,
)
def test_other_parameters_are_the_engines_to_refuse(given: Any, log_probs: Any, of_prompt: Any) -> None:
    engine = Engine()
    found = generate_request_outputs(engine, "a", vllm.SamplingParams(**given))
    params = engine.asked[0][1]
    assert (params.logprobs, params.prompt_logprobs) == (log_probs, of_prompt)
    assert isinstance(found, vllm.RequestOutput)
    assert engine.scored == []


def test_a_mapping_or_nothing_goes_as_it_is() -> None:
    engine = Engine()
    for params in ({"max_tokens": 3}, None):
        generate_request_outputs(engine, prompts=["a"], sampling_params=params, use_tqdm=True)
        assert engine.asked[-1] == (["a"], params, {"use_tqdm": True})
