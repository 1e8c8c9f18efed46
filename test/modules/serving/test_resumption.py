"""What a completion becomes that is to be finished, and what is no such completion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.completions import cut
from torchrl_moe.modules.backends.replica import Completion, KeptIds, Request
from torchrl_moe.modules.serving.requests import check_resume, request_to_resume, whole
from torchrl_moe.testing.fake_engine import LAYOUT, FakeReplica

PARAMS = {"max_tokens": 8, "logprobs": 0, "n": 2}


def answer(prompt: Any = "hi", **params: Any) -> Completion:
    ids = None if isinstance(prompt, str) else np.array(prompt, np.int32)
    text = prompt if ids is None else None
    asked = Request(request_id="r", sampling_params={**PARAMS, **params}, prompt=text, prompt_token_ids=ids)
    return FakeReplica().submit([asked])[0].result()


def resuming(completion: Completion, **fields: Any) -> Request:
    return request_to_resume(completion, **{"request_id": "new", "sampling_params": PARAMS, **fields})


def test_a_request_has_the_prompts_ids_and_what_there_is() -> None:
    partial = cut(answer(), 3, None)
    request = resuming(partial, priority=4)
    assert request.resume is partial
    assert (request.request_id, request.prompt, request.priority) == ("new", None, 4)
    assert request.prompt_token_ids is not None
    assert (request.prompt_token_ids.tolist(), request.prompt_token_ids.dtype) == ([104, 105], np.int32)
    assert whole(request) is None


@pytest.mark.parametrize("prompt", ["hi", [104, 105]])
def test_what_had_no_token_begins_with_its_own_prompt(prompt: Any) -> None:
    request = resuming(cut(answer(prompt), 0, 0))
    assert request.resume is None
    assert request.prompt == (prompt if isinstance(prompt, str) else None)
    assert (request.prompt_token_ids is None) is isinstance(prompt, str)
    assert whole(request) is None
    check_resume(request, 0, LAYOUT)


def test_what_never_came_to_an_engine_keeps_its_text() -> None:
    nothing = replace(cut(answer(), 0, 0), prompt_token_ids=np.empty(0, np.int64))
    assert resuming(nothing).prompt == "hi"


def test_what_is_whole_is_the_answer_whatever_is_asked_for_now() -> None:
    done = answer()
    request = resuming(done, sampling_params={"n": 5})
    assert whole(request) is done
    check_resume(request, 0, None)


def test_what_an_engine_gave_is_taken() -> None:
    check_resume(resuming(cut(answer(), 3, None)), 0, LAYOUT)
    check_resume(resuming(cut(answer(), 1, 0)), 0, LAYOUT)  # an answer without a token has no log-probs and no routes
    check_resume(resuming(cut(answer(logprobs=None), 3, 4), sampling_params={"n": 2}), 0, LAYOUT)
    words = KeptIds(np.zeros(3, np.int32), np.array([1, 0, -2], np.int32))
    check_resume(resuming(changed(cut(answer(), 3, None), kept=words)), 0, LAYOUT)
    check_resume(Request(request_id="r", sampling_params=None, prompt="hi"), 0, LAYOUT)


def changed(completion: Completion, **fields: Any) -> Completion:
    first, second = completion.outputs
    return replace(completion, outputs=[replace(first, **fields), second])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy_versions": np.zeros(2, np.int32)}, "no completion of an engine: 2 prompt tokens, 3 tokens, lengths"),
        ({"logprobs": np.zeros(4, np.float32)}, "no completion of an engine: 2 prompt tokens, 3 tokens, lengths"),
        (
            {"kept": KeptIds(np.zeros(1, np.int32), np.array([1, 0], np.int32))},
            "no completion of an engine: 2 prompt tokens, 3 tokens, lengths .*'kept': 2",
        ),
        (
            {"kept": KeptIds(np.zeros(2, np.int32), np.array([1, 0, -2], np.int32))},
            "no completion of an engine: it has 2 kept ids, and their sizes say 3",
        ),
        ({"logprobs": None}, "it has no log-probs, which sampling_params ask for: pass those that it started with"),
        ({"routed_experts": None}, "it has no routes: pass return_routed_experts=False, as when it started"),
        (
            {"routed_experts": np.zeros((4, 5, 2), np.uint8)},
            r"its routes have shape \[4, 5, 2\], but this engine gives \[4, 4, 2\]",
        ),
        (
            {"routed_experts": np.zeros((3, 4, 2), np.uint8)},
            r"its routes have shape \[3, 4, 2\], but this engine gives \[4, 4, 2\]",
        ),
        (
            {"routed_experts": np.full((4, 4, 2), 200, np.uint8)},
            r"its routes are 200\.\.200 of uint8, but this engine has experts 0\.\.7",
        ),
        ({"routed_experts": np.full((4, 4, 2), -1, np.int8)}, r"its routes are -1\.\.-1 of int8"),
        ({"routed_experts": np.zeros((4, 4, 2), np.float32)}, r"its routes are 0\.0\.\.0\.0 of float32"),
    ],
)
def test_what_is_no_part_of_the_answer_is_refused(fields: dict[str, Any], words: str) -> None:
    request = resuming(changed(cut(answer(), 3, None), **fields))
    with pytest.raises(ValueError, match=rf"^resume\[7\], answer 0: {words}"):
        check_resume(request, 7, LAYOUT)


def test_a_part_without_a_prompt_is_refused() -> None:
    request = resuming(replace(cut(answer(), 3, None), prompt_token_ids=np.empty(0, np.int64)))
    with pytest.raises(ValueError, match="no completion of an engine: 0 prompt tokens"):
        check_resume(request, 0, LAYOUT)


def test_routes_that_are_not_asked_for_may_be_missing() -> None:
    partial = changed(cut(answer(), 3, None), routed_experts=None)
    check_resume(resuming(partial, return_routed_experts=False), 0, LAYOUT)
    check_resume(resuming(partial), 0, None)


@pytest.mark.parametrize("params", [{"n": 3}, {}, {"n": 1}])
def test_another_number_of_answers_is_refused(params: dict[str, Any]) -> None:
    request = resuming(cut(answer(), 3, None), sampling_params=params)
    words = rf"resume\[1\] has 2 answers, but sampling_params ask for n={params.get('n', 1)}"
    with pytest.raises(ValueError, match=words):
        check_resume(request, 1, LAYOUT)
