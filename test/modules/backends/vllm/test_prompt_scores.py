"""Logits of a prompt's tokens, brought to what they were sampled by; and what vLLM says of them, read."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.modules.backends.kept_ids import KeptIds
from torchrl_moe.modules.backends.replica import Scoring
from torchrl_moe.modules.backends.vllm.prompt_scores import adjusted, prompt_logprobs, scoring_params

LOGITS = torch.tensor([[0.0, 2.0, 4.0, -2.0], [1.0, 1.0, 1.0, 1.0]])
KEPT = KeptIds(np.array([1, 2, 0], np.int32), np.array([0, 0, 2, -1, 0], np.int32))


def sampling_params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, extra_args={"mine": 1})


def test_vllm_is_asked_for_the_prompts_own_tokens_which_no_cache_may_skip() -> None:
    asked = sampling_params()
    params = scoring_params(asked, Scoring(), 7)
    assert (params.prompt_logprobs, params.flat_logprobs, params.skip_reading_prefix_cache) == (0, True, True)
    assert params.routed_experts_prompt_start == 7  # nobody asked for them
    assert params.extra_args["mine"] == 1
    assert (asked.prompt_logprobs, asked.extra_args) == (None, {"mine": 1})


def test_a_temperature_divides() -> None:
    params = scoring_params(sampling_params(), Scoring(temperature=0.5), 3)
    assert adjusted(LOGITS, params, 0).tolist() == (LOGITS * 2).tolist()
    assert adjusted(LOGITS.bfloat16(), params, 0).dtype == torch.float32


@pytest.mark.parametrize(
    ("start", "rows"), [(0, [[0, 1, 2, 3], [1, 2]]), (1, [[1, 2], [1, 2, 3]]), (3, [[0, 1, 2, 3]])]
)
def test_words_are_those_of_the_tokens_that_logits_are_of(start: int, rows: list[list[int]]) -> None:
    """Row t of the model's output is of token t + 1: token 2 kept words 1 and 2, token 3 all but word 0."""
    params = scoring_params(sampling_params(), Scoring(kept=KEPT), 5)
    found = adjusted(LOGITS[: len(rows)], params, start)
    for row, given, words in zip(found, LOGITS, rows, strict=False):
        assert row.isfinite().nonzero()[:, 0].tolist() == words
        assert torch.equal(row[words], given[words])


def test_logits_of_a_request_that_wants_no_scores_are_the_models() -> None:
    assert adjusted(LOGITS, sampling_params(), 0) is LOGITS
    assert adjusted(LOGITS, SimpleNamespace(extra_args=None), 0) is LOGITS


def flat(*values: float | None) -> Any:
    """As vLLM lists them: one for each position, none for the first."""
    starts, listed = [], []
    for value in values:
        starts.append(len(listed))
        listed += [] if value is None else [value]
    return SimpleNamespace(start_indices=starts, logprobs=listed)


@pytest.mark.parametrize("values", [(None, -1.0, -0.5), (None,)])
def test_scores_are_read_with_nothing_for_the_first_token(values: tuple[float | None, ...]) -> None:
    scores = prompt_logprobs(flat(*values), len(values))
    assert scores is not None
    assert scores.dtype == np.float32
    assert math.isnan(scores[0])
    assert scores[1:].tolist() == list(values[1:])


def test_a_prompt_that_was_cut_has_no_scores() -> None:
    assert prompt_logprobs(None, 3) is None
    assert prompt_logprobs(flat(None), 3) is None  # as vLLM gives it: the first token's place, and nothing more
    assert prompt_logprobs(flat(None, -1.0), 3) is None
