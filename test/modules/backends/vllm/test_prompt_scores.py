"""Logits of a prompt's tokens, brought to what they were sampled by; and what vLLM says of them, read."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchrl_moe.modules.backends.replica import KeptIds, Scoring
from torchrl_moe.modules.backends.vllm.sampling import adjust_scores, adjusted, prompt_logprobs, scoring_params

LOGITS = torch.tensor([[0.0, 2.0, 4.0, -2.0], [1.0, 1.0, 1.0, 1.0]])
KEPT = KeptIds(np.array([1, 2, 0], np.int32), np.array([0, 0, 2, -1, 0], np.int32))


def sampling_params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, extra_args={"mine": 1})


def test_vllm_is_asked_for_the_prompts_own_tokens_which_no_cache_may_skip() -> None:
    asked = sampling_params()
    params = scoring_params(asked, Scoring(), np.array([5, 6, 7]))
    assert params.prompt_logprob_token_ids.tolist() == [[6], [7]]
    assert params.skip_reading_prefix_cache is True
    assert params.routed_experts_prompt_start == 3  # nobody asked for them
    assert params.extra_args == {"mine": 1}  # at temperature 1, over all words, there is nothing to adjust
    assert (asked.prompt_logprob_token_ids, asked.extra_args) == (None, {"mine": 1})
    assert scoring_params(asked, Scoring(), np.array([5])).prompt_logprob_token_ids is None  # nothing before it


def test_a_temperature_divides() -> None:
    params = scoring_params(sampling_params(), Scoring(temperature=0.5), np.arange(3))
    assert adjusted(LOGITS, params, 0).tolist() == (LOGITS * 2).tolist()
    assert adjusted(LOGITS.bfloat16(), params, 0).dtype == torch.float32


@pytest.mark.parametrize(
    ("start", "rows"), [(0, [[0, 1, 2, 3], [1, 2]]), (1, [[1, 2], [1, 2, 3]]), (3, [[0, 1, 2, 3]])]
)
def test_words_are_those_of_the_tokens_that_logits_are_of(start: int, rows: list[list[int]]) -> None:
    """Row t of the model's output is of token t + 1: token 2 kept tokens 1 and 2, token 3 all but word 0."""
    params = scoring_params(sampling_params(), Scoring(kept=KEPT), np.arange(5))
    found = adjusted(LOGITS[: len(rows)], params, start)
    for row, given, words in zip(found, LOGITS, rows, strict=False):
        assert row.isfinite().nonzero()[:, 0].tolist() == words
        assert torch.equal(row[words], given[words])


def test_logits_of_a_request_that_wants_no_scores_are_the_models() -> None:
    assert adjusted(LOGITS, sampling_params(), 0) is LOGITS
    assert adjusted(LOGITS, SimpleNamespace(extra_args=None), 0) is LOGITS


@pytest.mark.parametrize("values", [[-1.0, -0.5], []])
def test_scores_are_read_with_nothing_for_the_first_token(values: list[float]) -> None:
    scores = prompt_logprobs(np.array(values)[:, None] if values else None, len(values) + 1)
    assert scores is not None
    assert scores.dtype == np.float32
    assert math.isnan(scores[0])
    assert scores[1:].tolist() == values


def test_a_prompt_that_was_cut_has_no_scores() -> None:
    assert prompt_logprobs(None, 3) is None


class ScoringWorker:
    """vLLM's worker for log-probs of prompts, with logits that are its hidden states."""

    def __init__(self) -> None:
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

        self.prompt_logprobs_worker = PromptLogprobsWorker(4, torch.device("cpu"))
        adjust_scores(self)
        adjust_scores(self)  # once is enough

    def step(self, logits: Tensor, *spans: tuple[str, int, int], prompt: int) -> dict[str, list[float]]:
        batch = SimpleNamespace(
            req_ids=[name for name, _, _ in spans],
            idx_mapping_np=np.arange(len(spans)),
            num_computed_prefill_tokens_np=np.array([start for _, start, _ in spans]),
            num_scheduled_tokens=np.array([count for _, _, count in spans]),
            query_start_loc_np=np.cumsum([0, *(count for _, _, count in spans)]),
            prefill_len_np=np.full(len(spans), prompt),
        )
        found = self.prompt_logprobs_worker.compute_prompt_token_id_logprobs(
            lambda hidden: hidden.clone(), logits, batch, np.full(len(spans), prompt)
        )
        return {name: scores[:, 0].tolist() for name, scores in found.items()}


def test_each_request_of_a_step_is_scored_by_its_own_temperature_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks too, and beside one that has nothing to adjust; by hand from logits 0, 2, 4, -2."""
    from vllm.v1.worker.gpu.sample import prompt_logprob

    monkeypatch.setattr(  # a Triton kernel
        prompt_logprob, "compute_token_logprobs", lambda logits, ids: logits.log_softmax(-1).gather(-1, ids)
    )
    ids = np.array([0, 1, 2, 1, 2])
    worker = ScoringWorker()
    add = worker.prompt_logprobs_worker.add_request
    add("plain", 0, scoring_params(sampling_params(), Scoring(), ids))
    add("warm", 1, scoring_params(sampling_params(), Scoring(temperature=2.0), ids))
    add("kept", 2, scoring_params(sampling_params(), Scoring(kept=KEPT), ids))
    row = LOGITS[0]
    assert worker.step(row.expand(9, 4), ("warm", 0, 3), ("plain", 0, 3), ("kept", 0, 3), prompt=5) == {}
    found = worker.step(row.expand(6, 4), ("kept", 3, 2), ("warm", 3, 2), ("plain", 3, 2), prompt=5)
    plain, warm = row.log_softmax(-1), (row / 2).log_softmax(-1)
    assert found["plain"] == pytest.approx([float(plain[i]) for i in ids[1:]])
    assert found["warm"] == pytest.approx([float(warm[i]) for i in ids[1:]])
    two, but_first = row[[1, 2]].log_softmax(-1), row[1:].log_softmax(-1)  # what tokens 2 and 3 were drawn from
    assert found["kept"] == pytest.approx([float(plain[1]), float(two[1]), float(but_first[0]), float(plain[2])])
    assert not worker.prompt_logprobs_worker.token_id_scores
    worker.prompt_logprobs_worker.remove_request("warm")
    assert "warm" not in worker.prompt_logprobs_worker.torchrl_moe_params
