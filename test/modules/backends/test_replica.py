"""The data classes of the replica protocol, and the kept tokens in them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import dense_mask
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import (
    Completion,
    CompletionOutput,
    KeptIds,
    ReplicaStats,
    Request,
    leaves_ids_out,
    name_kept,
    without_known_rows,
)


def output(index: int = 0, finish_reason: str = "stop", **fields: object) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        token_ids=np.array([7, 8]),
        text="hi",
        finish_reason=finish_reason,
        policy_versions=np.zeros(2, np.int32),
        **fields,
    )


def completion(*outputs: CompletionOutput) -> Completion:
    return Completion(
        request_id="r", prompt=None, prompt_token_ids=np.array([1, 2, 3]), num_cached_tokens=1, outputs=list(outputs)
    )


def test_a_completion_is_aborted_if_one_answer_is() -> None:
    assert not completion(output(0), output(1, "length")).aborted
    assert completion(output(0), output(1, "abort")).aborted
    assert not completion().aborted


@pytest.mark.parametrize(
    ("start", "outputs", "first"),
    [
        (0, ["stop"], 0),
        (1, ["stop"], 1),
        (3, ["stop"], 1),  # one token was cached: the others were read again, perhaps by other experts
        (3, ["abort"], 0),  # its rest follows all of them
        (3, ["stop", "stop"], 0),  # each with hits of its own
    ],
)
def test_rows_that_the_caller_has_are_left_out(start: int, outputs: list[str], first: int) -> None:
    rows = np.arange(4, dtype=np.uint8).reshape(4, 1, 1)
    given = completion(*(output(i, reason, routed_experts=rows) for i, reason in enumerate(outputs)))
    request = Request(request_id="r", sampling_params={"routed_experts_prompt_start": start}, prompt="hi")
    for one in without_known_rows(given, request).outputs:
        assert one.routed_experts.tolist() == rows[first:].tolist()
    without = completion(output())
    assert without_known_rows(without, request).outputs[0].routed_experts is None


@pytest.mark.parametrize("params", [{"n": 2}, SimpleNamespace(n=2)], ids=["mapping", "object"])
def test_a_request_knows_its_sampling_parameters_however_they_came(params: object) -> None:
    request = Request(request_id="r", sampling_params=params, prompt="hi")
    assert (request.param("n"), request.param("logprobs")) == (2, None)
    assert Request(request_id="r", sampling_params=None, prompt="hi").param("n") is None


def test_a_completion_that_an_older_release_saved_can_be_read() -> None:
    """Collectors keep them in checkpoints. Fields that it did not have yet get their defaults."""
    whole = completion(output(resume="forced"))
    whole.prompt_logprobs = np.zeros(3, np.float32)
    again = pickle.loads(pickle.dumps(whole))
    assert again.outputs[0].resume == "forced"
    assert len(again.prompt_logprobs) == 3
    old = pickle.loads(pickle.dumps(whole))
    del old.prompt_logprobs, old.outputs[0].resume, old.outputs[0].kept
    again = pickle.loads(pickle.dumps(old))
    assert (again.prompt_logprobs, again.outputs[0].resume, again.outputs[0].kept) == (None, "none", None)
    assert again.prompt_token_ids.tolist() == whole.prompt_token_ids.tolist()


def test_the_hit_rate_is_of_tokens_looked_up() -> None:
    assert [ReplicaStats(cache_queries=asked, cache_hits=2).hit_rate for asked in (0, 8)] == [0.0, 0.25]


# -- kept tokens -------------------------------------------------------------------------------------------------------


INF = float("inf")


def kept(ids: list[int], sizes: list[int]) -> KeptIds:
    return KeptIds(np.array(ids, np.int32), np.array(sizes, np.int32))


def check(got: KeptIds | None, ids: list[int], sizes: list[int]) -> None:
    assert got is not None
    assert (got.ids.dtype, got.sizes.dtype) == (np.int32, np.int32)
    assert (got.ids.tolist(), got.sizes.tolist()) == (ids, sizes)


def log_probs_of(mask: torch.Tensor) -> torch.Tensor:
    """Some finite log-probs, -inf where a word is left out."""
    return torch.linspace(-60.0, -0.1, mask.numel()).view(mask.shape).masked_fill(~mask, -INF)


def test_a_batch_of_all_words_says_nothing() -> None:
    assert name_kept(torch.zeros(3, 4), [0, 1, 2]) is None
    assert name_kept(torch.tensor([[-1e30, 0.0]]), [0]) is None  # unlikely is not left out


MASKS = st.integers(2, 9).flatmap(
    lambda words: st.lists(
        st.lists(st.booleans(), min_size=words, max_size=words).filter(any), min_size=1, max_size=8
    ).map(torch.tensor)
)


@settings(max_examples=100)
@given(mask=MASKS, data=st.data())
def test_words_named_step_by_step_are_those_of_the_mask(mask: torch.Tensor, data: st.DataObject) -> None:
    """Two answers, sampled together; then cut in two and joined."""
    tokens, words = mask.shape
    other = mask.flip(0)
    steps: list[list[np.ndarray]] = [[], []]
    for t in range(tokens):
        named = name_kept(log_probs_of(torch.stack([mask[t], other[t]])), [t, t])
        if named is None:
            continue
        for row in range(2):
            steps[row].append(named[0][named[1][row] : named[1][row + 1]])
    for said, meant in zip(steps, (mask, other), strict=True):
        whole = KeptIds.of_steps(said, tokens)
        if bool(meant.all()):
            assert whole is None
            continue
        assert whole is not None
        as_data = KeptTokens(ids=torch.from_numpy(whole.ids), sizes=torch.from_numpy(whole.sizes))
        as_data.validate(vocabulary=words, num_tokens=tokens)
        assert torch.equal(dense_mask(as_data.ids, as_data.sizes, words), meant)
        assert all(2 * abs(size) <= words for size in whole.sizes.tolist())
        cut = data.draw(st.integers(0, tokens))
        first = KeptIds.of_steps(said, cut)
        later = [np.array([step[0] - cut, *step[1:]], np.int32) for step in said if len(step) and step[0] >= cut]
        joined = KeptIds.join([first, KeptIds.of_steps(later, tokens - cut)], [cut, tokens - cut])
        check(joined, whole.ids.tolist(), whole.sizes.tolist())
        if first is not None:
            check(whole.first(cut), first.ids.tolist(), first.sizes.tolist())


@pytest.mark.parametrize("steps", [[[1, 5], [1, 6]], [[2, 5], [0, 6]], [[0, 5], [1]]])
def test_words_of_tokens_in_no_order_are_no_words(steps: list[list[int]]) -> None:
    with pytest.raises(EngineError, match="the engine reported kept tokens for the tokens"):
        KeptIds.of_steps([np.array(step, np.int32) for step in steps], 4)


# -- parameters --------------------------------------------------------------------------------------------------------

LEAVING = [
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"min_tokens": 2},
    {"bad_words": ["x"]},
    {"allowed_token_ids": [1]},
    {"structured_outputs": {"regex": "a"}},
]
KEEPING: list[dict[str, Any]] = [
    {},
    {"top_k": 0},
    {"top_k": -1},
    {"top_p": 1},
    {"min_p": 0.0},
    {"min_tokens": 0},
    {"bad_words": []},
    {"allowed_token_ids": None},
    {"temperature": 0.3, "max_tokens": 7, "stop": ["x"], "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("params", LEAVING)
def test_parameters_that_leave_ids_out(params: dict[str, Any]) -> None:
    (name,) = params
    assert leaves_ids_out(params.get) == name


@pytest.mark.parametrize("params", KEEPING)
def test_parameters_that_do_not(params: dict[str, Any]) -> None:
    assert leaves_ids_out(params.get) is None
