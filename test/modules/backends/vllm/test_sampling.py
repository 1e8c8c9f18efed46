"""What users pass as sampling parameters, as vLLM gets it; masks and scores that its worker reports."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchrl_moe._compat import vllm_client_errors
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.replica import KeptIds, Request, Scoring
from torchrl_moe.modules.backends.vllm.sampling import (
    SamplingParamsBuilder,
    adjust_scores,
    check_bad_words,
    prompt_logprobs,
    report_kept,
    scoring_params,
)
from torchrl_moe.testing import ByteTokenizer

if TYPE_CHECKING:  # vLLM takes seconds to import: no reason to make other tests wait when this file is collected
    from vllm import SamplingParams


def build(spec: Any, guided_options: Any = None) -> SamplingParams:
    from vllm import SamplingParams

    params = SamplingParamsBuilder()(spec, guided_options)
    assert isinstance(params, SamplingParams)
    return params


def vllm_object(**fields: Any) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(**fields)


@pytest.mark.parametrize("wrap", [dict, vllm_object])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 3, "n": 2}])
def test_output_is_final_only_whatever_was_passed(wrap: Callable[..., Any], fields: dict[str, Any]) -> None:
    from vllm.sampling_params import RequestOutputKind

    assert build(wrap(**fields)).output_kind is RequestOutputKind.FINAL_ONLY
    assert build(None).output_kind is RequestOutputKind.FINAL_ONLY


def test_an_object_means_the_same_on_the_other_side_of_a_process() -> None:
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    spec = vllm_object(
        temperature=0.0,
        stop="x",
        stop_token_ids=[3, 3],
        bad_words=["q"],
        logit_bias={7: 1.5},
        logprobs=0,
        structured_outputs=StructuredOutputsParams(regex="a+"),
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3),
        extra_args={"mine": [1, (2, 3)]},
    )
    (request,) = link.decode(link.encode([Request(request_id="r", prompt="x", sampling_params=spec)]))
    there = build(request.sampling_params)
    assert (there.structured_outputs.regex, there.repetition_detection.min_count) == ("a+", 3)
    assert there.extra_args == {"mine": [1, [2, 3]]}
    spec.extra_args = there.extra_args  # all but the tuple came as it was
    assert there == build(spec)


@pytest.mark.parametrize("wrap", [dict, vllm_object])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 5),
        ("logprobs", -1),
        ("prompt_logprobs", 0),
        ("prompt_logprob_token_ids", [[1], [2]]),
    ],
)
def test_what_no_completion_carries_is_refused(wrap: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams\\({name}={re.escape(repr(value))}\\): a completion has the"):
        build(wrap(**{name: value}))


def test_an_engine_that_reports_no_kept_tokens_gives_no_log_probs_over_a_part_of_the_vocabulary() -> None:
    fields = {"top_k": 5}
    silent = SamplingParamsBuilder(reports_kept=False)
    with pytest.raises(
        ValueError, match=r"^top_k=.* leaves vocabulary entries out, and this engine does not say which"
    ):
        silent({**fields, "logprobs": 0})
    assert silent(fields).logprobs is None
    assert build({**fields, "logprobs": 0}).logprobs == 0


@pytest.mark.parametrize(
    ("mode", "temperature", "words"),
    [
        ("raw_logprobs", 0.7, r"^temperature=0\.7, and this engine's log-probs are of temperature 1"),
        ("raw_logits", 1.0, r"^logprobs=0, and this engine gives logits instead of log-probs"),
        ("processed_logits", 1.0, r"^logprobs=0, and this engine gives logits instead of log-probs"),
    ],
)
def test_log_probs_are_of_the_distribution_that_is_sampled_from(mode: str, temperature: float, words: str) -> None:
    builder = SamplingParamsBuilder(reports_kept=False, logprobs_mode=mode)
    with pytest.raises(ValueError, match=f"{words}.*leave out logprobs_mode, or logprobs"):
        builder({"temperature": temperature, "logprobs": 0})
    assert builder({"temperature": temperature}).logprobs is None


@pytest.mark.parametrize("wrap", [dict, vllm_object])
@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 1.5), ("logprobs", 0.0), ("temperature", True), ("ignore_eos", "yes"), ("logit_bias", {1: "x"})],
)
def test_what_vllms_core_cannot_read_does_not_reach_it(wrap: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^sampling_params: Expected .* at `\$\.{name}"):
        build(wrap(**{name: value}))


def test_more_bad_words_than_the_engine_has_room_for_are_refused() -> None:
    def check(*words: str) -> None:
        tokenizer: Any = ByteTokenizer()
        tokenizer.max_token_id = len(tokenizer) - 1  # as vLLM's own have it
        check_bad_words(build({"bad_words": list(words)}), tokenizer)

    check("a", "b")
    with pytest.raises(ValueError, match=r"bad_words are .* tokens, .*; the engine has room for 128 of 1024"):
        check("a" * 1025)
    with pytest.raises(vllm_client_errors(), match=r"bad.words"):
        check(*map(str, range(200)))


def test_guided_options_become_structured_outputs() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    for options in ({"regex": "a+"}, StructuredOutputsParams(regex="a+")):
        structured = build({"max_tokens": 4}, options).structured_outputs
        assert structured is not None
        assert structured.regex == "a+"


def test_an_address_that_is_used_again_is_not_taken_for_the_old_value() -> None:
    builder = SamplingParamsBuilder()
    for max_tokens in range(1, 200):
        assert builder({"max_tokens": max_tokens}).max_tokens == max_tokens


# -- masks of kept tokens; those of a real engine are in test_truncated_sampling.py ------------------------------------


WORDS = 9


def masks(*rows: list[int], rows_per_request: int = 1) -> Any:
    """vLLM's tensors of these kept ids; lists longer than two are in the bit mask only, as long ones are."""
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    kept = np.zeros((len(rows), WORDS), bool)
    ids = np.zeros((len(rows), 2), np.int32)
    for row, words in enumerate(rows):
        kept[row, words] = True
        ids[row, : len(words[:2])] = words[:2]
    packed = np.packbits(kept, axis=1, bitorder="little")
    counts = torch.from_numpy(kept.sum(1).astype(np.int32))
    return SamplingMaskTensors(torch.from_numpy(ids), torch.from_numpy(packed), counts, WORDS, rows_per_request)


class Runner:
    """A model runner of vLLM's shape whose sampler has sampled."""

    def __init__(self, *rows: list[int], rows_per_request: int = 1) -> None:
        self.max_num_reqs = 8
        self.rows, self.rows_per_request = rows, rows_per_request
        self.sampler = SimpleNamespace(add_request=lambda slot, params: None, return_sampling_mask=True)

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        on = self.sampler.return_sampling_mask
        found = masks(*self.rows, rows_per_request=self.rows_per_request) if on else None
        return SimpleNamespace(sampling_mask_tensors=found), "num_sampled", "num_rejected"


def said(runner: Runner, *params: dict[str, Any], num_sampled: list[int] | None = None) -> Any:
    """The masks of a step of requests with these parameters, request by request; None if there are none."""
    from vllm import SamplingParams

    report_kept(runner)
    report_kept(runner)  # once is enough
    for slot, fields in enumerate(params):
        runner.sampler.add_request(slot, SamplingParams(**{"logprobs": 0, **fields}))
    output, *rest = runner.sample(None, SimpleNamespace(idx_mapping_np=np.arange(len(params))), None)
    assert rest == ["num_sampled", "num_rejected"]
    if output.sampling_mask_tensors is None:
        return None
    counts = num_sampled or [1] * len(params)
    lists = output.sampling_mask_tensors.to_cpu_nonblocking().tolists(np.array(counts))
    return [lists.slice_request(i, count).to_nested_list() for i, count in enumerate(counts)]


ALL = list(range(WORDS))


def test_masks_of_a_step() -> None:
    """Few words are named, many by those that were left out, all not at all; nor is what nobody wants."""
    runner = Runner([5, 7], [0, 1, 2, 3, 4, 5, 6, 8], ALL, [2, 3, 4], [1])
    cuts: dict[str, Any] = {"top_p": 0.9}
    assert said(runner, cuts, {"bad_words": ["x"]}, {"min_p": 0.1}, {}, {**cuts, "logprobs": None}) == [
        [[5, 7]],
        [[~7]],
        [[]],
        [[]],
        [[]],
    ]


@pytest.mark.parametrize("params", [{}, {"top_k": 0}, {"temperature": 0.3}, {"top_p": 0.5, "logprobs": None}])
def test_a_step_in_which_nothing_can_be_left_out_computes_none(params: dict[str, Any]) -> None:
    assert said(Runner(ALL), params) is None


def test_several_tokens_of_a_request_are_one_list_each() -> None:
    """As under speculative decoding."""
    runner = Runner([5, 7], [1, 2, 3, 4, 5, 6, 7, 8], [3], [0], rows_per_request=2)
    assert said(runner, {"top_k": 2}, {"top_k": 2}, num_sampled=[2, 1]) == [[[5, 7], [~0]], [[3]]]


# -- scores of prompts -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("values", [[-1.0, -0.5], []])
def test_scores_are_read_with_nothing_for_the_first_token(values: list[float]) -> None:
    scores = prompt_logprobs(np.array(values)[:, None] if values else None, len(values) + 1)
    assert scores is not None
    assert scores.dtype == np.float32
    assert math.isnan(scores[0])
    assert scores[1:].tolist() == values


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
