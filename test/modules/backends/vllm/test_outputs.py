"""vLLM's outputs, by hand-made objects of their shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import CompletionMetrics, Request
from torchrl_moe.modules.backends.vllm.engine_requests import completion_from_vllm, sampled_logprobs

ROUTES = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)


def request(**fields: Any) -> Request:
    return Request(request_id="ours", sampling_params=None, prompt="hi", **fields)


def answer(index: int = 0, **fields: Any) -> SimpleNamespace:
    given = {
        "index": index,
        "token_ids": [7, 8],
        "text": "ab",
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": None,
        "routed_experts": ROUTES,
        "sampling_mask": None,
    }
    return SimpleNamespace(**{**given, **fields})


def output(*answers: SimpleNamespace, **fields: Any) -> SimpleNamespace:
    given = {
        "request_id": "vllm's",
        "prompt": "hi",
        "prompt_token_ids": [104, 105, 33],
        "num_cached_tokens": 2,
        "outputs": list(answers),
        "metrics": None,
        "prompt_token_id_logprobs": None,
    }
    return SimpleNamespace(**{**given, **fields})


def flat(*positions: list[float]) -> SimpleNamespace:
    """``FlatLogprobs``: the values of all positions in one list, and where each begins."""
    starts = np.cumsum([0, *map(len, positions)])[:-1].tolist()
    return SimpleNamespace(start_indices=starts, logprobs=[value for position in positions for value in position])


def listed(*positions: list[float]) -> list[dict[int, SimpleNamespace]]:
    return [{90 - i: SimpleNamespace(logprob=value) for i, value in enumerate(position)} for position in positions]


@pytest.mark.parametrize("container", [flat, listed])
@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([[-1.5], [-0.25]], [-1.5, -0.25]),
        ([[-3.0, -0.5, -1.0], [-0.5, -0.5], [-2.0]], [-3.0, -0.5, -2.0]),  # the sampled one, not the best one
        ([], []),
    ],
)
def test_the_sampled_tokens_logprob_is_the_first_of_its_position(
    container: Any, positions: list[list[float]], expected: list[float]
) -> None:
    result = sampled_logprobs(container(*positions))
    assert result is not None
    assert result.dtype == np.float32
    assert result.tolist() == expected


def test_no_logprobs_stay_none() -> None:
    assert sampled_logprobs(None) is None


def test_vllms_own_flat_container_is_read_like_its_list() -> None:
    from vllm.logprobs import FlatLogprobs, Logprob

    positions = [{5: Logprob(-2.0), 9: Logprob(-0.1)}, {1: Logprob(-0.7)}]
    own = FlatLogprobs()
    own.extend(positions)
    for container in (own, positions):
        assert sampled_logprobs(container) == pytest.approx([-2.0, -0.7])


def test_fields_are_taken_over_under_our_request_id() -> None:
    completion = completion_from_vllm(output(answer(logprobs=flat([-1.0], [-2.0]), stop_reason=258)), request(), 5)
    assert (completion.request_id, completion.prompt, completion.num_cached_tokens) == ("ours", "hi", 2)
    assert completion.prompt_token_ids.tolist() == [104, 105, 33]
    assert completion.prompt_token_ids.dtype == np.int64
    (only,) = completion.outputs
    assert (only.text, only.finish_reason, only.stop_reason) == ("ab", "stop", 258)
    assert only.token_ids.tolist() == [7, 8]
    assert only.token_ids.dtype == np.int64
    assert only.logprobs is not None and only.logprobs.tolist() == [-1.0, -2.0]
    assert only.policy_versions.tolist() == [5, 5]
    assert only.policy_versions.dtype == np.int32
    assert only.routed_experts is ROUTES  # 3 + 2 - 1 rows, as the engine gave them


def test_answers_come_in_the_order_of_their_index() -> None:
    completion = completion_from_vllm(output(answer(2, text="c"), answer(0, text="a"), answer(1)), request(), 0)
    assert [(item.index, item.text) for item in completion.outputs] == [(0, "a"), (1, "ab"), (2, "c")]


def test_routes_are_dropped_where_they_were_not_asked_for() -> None:
    completion = completion_from_vllm(output(answer()), request(return_routed_experts=False), 0)
    assert completion.outputs[0].routed_experts is None


def test_words_that_were_left_out_are_taken_over() -> None:
    """Of the first token words 4 and 9 were kept, of the second all but word 3."""
    (only,) = completion_from_vllm(output(answer(sampling_mask=masks([4, 9], [~3]))), request(), 0).outputs
    assert only.kept is not None
    assert (only.kept.ids.tolist(), only.kept.sizes.tolist()) == ([4, 9, 3], [2, -1])
    with pytest.raises(EngineError, match="the kept tokens of 1 tokens, of an answer of 2"):
        completion_from_vllm(output(answer(sampling_mask=masks([4, 9]))), request(), 0)


def masks(*words: list[int]) -> SimpleNamespace:
    """vLLM's ``SamplingMask``."""
    return SimpleNamespace(token_ids=list(words))


@pytest.mark.parametrize("given", [None, masks(), masks([], []), masks([])])
def test_where_no_word_was_left_out_nothing_is_said(given: Any) -> None:
    assert completion_from_vllm(output(answer(sampling_mask=given)), request(), 0).outputs[0].kept is None


def test_a_request_aborted_before_its_first_token_is_empty_but_whole() -> None:
    cut = answer(token_ids=[], text="", finish_reason="abort", logprobs=flat(), routed_experts=None)
    completion = completion_from_vllm(output(cut, num_cached_tokens=None), request(), 3)
    assert completion.aborted
    assert completion.num_cached_tokens == 0
    (only,) = completion.outputs
    assert only.token_ids.shape == only.policy_versions.shape == (0,)
    assert only.logprobs is not None and only.logprobs.shape == (0,)
    assert only.routed_experts is None


def stamps(**times: float) -> SimpleNamespace:
    given = {"queued_ts": 100.0, "scheduled_ts": 0.0, "first_token_ts": 0.0, "last_token_ts": 0.0}
    return SimpleNamespace(**{**given, **times})


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (None, (0.0, 0.0, 0.0)),
        (stamps(scheduled_ts=100.5, first_token_ts=100.75, last_token_ts=103.0), (0.5, 0.75, 3.0)),
        (stamps(), (0.0, 0.0, 0.0)),  # cut before it was scheduled
        (stamps(scheduled_ts=101.0), (1.0, 0.0, 0.0)),  # cut before its first token
    ],
)
def test_times_are_differences_of_stamps_and_0_where_a_stage_was_not_reached(
    metrics: Any, expected: tuple[float, float, float]
) -> None:
    found = completion_from_vllm(output(answer(), metrics=metrics), request(), 0).metrics
    queue, first, total = expected
    assert found == CompletionMetrics(queue_seconds=queue, first_token_seconds=first, total_seconds=total)
