"""Sampling parameters as vLLM gets them, masks and scores that its worker reports, and answers that are continued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from torchrl_moe._compat import vllm_client_errors
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.replica import CompletionOutput, KeptIds, Request, Scoring
from torchrl_moe.modules.backends.vllm.continuation import can_continue, join, request_for_rest, sampling_for_rest
from torchrl_moe.modules.backends.vllm.sampling import (
    SamplingParamsBuilder,
    adjusted,
    check_bad_words,
    lift_top_k_rule,
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


def test_an_object_means_the_same_on_the_other_side_of_a_process() -> None:
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    plain: dict[str, Any] = {"temperature": 0.0, "stop": "x", "stop_token_ids": [3, 3], "bad_words": ["q"]}
    spec = vllm_object(
        **plain,
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


REFUSALS = {
    "not carried": r"SamplingParams\({name}=.*\): a completion has the log-probs of its sampled tokens only",
    "not read": r"^sampling_params: Expected .* at `\$\.{name}",
}


@pytest.mark.parametrize("wrap", [dict, vllm_object])
@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        ("logprobs", 5, "not carried"),
        ("logprobs", -1, "not carried"),
        ("prompt_logprobs", 0, "not carried"),
        ("prompt_logprob_token_ids", [[1], [2]], "not carried"),
        # what vLLM's core cannot read, which would end it
        ("max_tokens", 1.5, "not read"),
        ("logprobs", 0.0, "not read"),
        ("temperature", True, "not read"),
        ("ignore_eos", "yes", "not read"),
        ("logit_bias", {1: "x"}, "not read"),
    ],
)
def test_what_none_carries_or_reads_is_refused_however_it_came(
    wrap: Callable[..., Any], name: str, value: Any, refusal: str
) -> None:
    with pytest.raises(ValueError, match=REFUSALS[refusal].format(name=name)):
        build(wrap(**{name: value}))


BAD_OPTIONS: tuple[Any, ...] = ({"regexp": "a+"}, {}, {"regex": "a+", "choice": ["a"]}, "a+")


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        ({"max_token": 3}, None, TypeError, "max_token"),
        ({"temperature": -1.0}, None, Exception, "temperature must be non-negative"),
        ({"n": 0}, None, Exception, "n must be at least 1"),
        (5, None, ValueError, r"sampling_params must be .*, got int"),
        ("greedy", None, ValueError, r"sampling_params must be .*, got str"),
        *(({}, options, Exception, "structured outputs|guided_options") for options in BAD_OPTIONS),
    ],
)
def test_what_vllm_does_not_know_is_refused(spec: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        build(spec, options)
    assert isinstance(caught.value, vllm_client_errors())  # a refusal, not a failure of the engine


@pytest.mark.parametrize(
    ("how", "fields", "words"),
    [
        ({}, {"top_k": 5}, "^top_k=.* leaves vocabulary entries out, and this engine does not say which"),
        ({"logprobs_mode": "raw_logprobs"}, {"temperature": 0.7}, r"^temperature=0\.7, and .* of temperature 1"),
        ({"logprobs_mode": "raw_logits"}, {}, "^logprobs=0, and this engine gives logits instead of log-probs"),
        ({"logprobs_mode": "processed_logits"}, {}, "^logprobs=0, and this engine gives logits instead of log-probs"),
    ],
)
def test_log_probs_are_of_the_distribution_that_is_sampled_from(how: Any, fields: Any, words: str) -> None:
    builder = SamplingParamsBuilder(reports_kept=False, **how)
    with pytest.raises(ValueError, match=f"{words}.*[Ll]eave out .*, or logprobs"):
        builder({**fields, "logprobs": 0})
    assert builder(fields).logprobs is None
    assert build({**fields, "logprobs": 0}).logprobs == 0


def test_what_is_built_is_final_and_new_for_each_value() -> None:
    """A batch shares its parameters; an address that is used again is not taken for the old value."""
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    builder = SamplingParamsBuilder(reads_cache=False)
    for max_tokens in range(1, 200):
        assert builder({"max_tokens": max_tokens}).max_tokens == max_tokens
    assert builder({}).skip_reading_prefix_cache is True
    for spec in (None, {}, {"n": 2}, vllm_object(n=2)):
        assert build(spec).output_kind is RequestOutputKind.FINAL_ONLY  # whatever was passed
        assert not build(spec).skip_reading_prefix_cache
    for options in ({"regex": "a+"}, StructuredOutputsParams(regex="a+")):
        assert build({"max_tokens": 4}, options).structured_outputs.regex == "a+"


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


# -- masks of kept tokens; those of a real engine are in test/contract/test_policy_sampling.py ------------------------
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
    found = said(runner, cuts, {"bad_words": ["x"]}, {"min_p": 0.1}, {}, {**cuts, "logprobs": None})
    assert found == [[[5, 7]], [[~7]], [[]], [[]], [[]]]
    # under speculative decoding a request has several tokens
    runner = Runner([5, 7], [1, 2, 3, 4, 5, 6, 7, 8], [3], [0], rows_per_request=2)
    assert said(runner, {"top_k": 2}, {"top_k": 2}, num_sampled=[2, 1]) == [[[5, 7], [~0]], [[3]]]


def test_a_step_in_which_nothing_can_be_left_out_computes_none_and_a_mask_needs_no_top_k() -> None:
    for params in ({}, {"top_k": 0}, {"temperature": 0.3}, {"top_p": 0.5, "logprobs": None}):
        assert said(Runner(ALL), params) is None
    engine: Any = SimpleNamespace(model_config=SimpleNamespace(return_sampling_mask=True))
    assert [lift_top_k_rule(engine), lift_top_k_rule(engine)] == [True, False]  # vLLM's frontend has the rule


# -- scores of prompts; their values are in test_real_engine.py and test/contract/test_policy_sampling.py --------------
ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "extra_args": {"mine": 1}}
LOGITS = torch.tensor([[0.0, 2.0, 4.0, -2.0], [1.0, 1.0, 1.0, 1.0]])


def test_vllm_is_asked_for_the_prompts_own_tokens_which_no_cache_may_skip() -> None:
    asked = vllm_object(**ONE_TOKEN)
    params = scoring_params(asked, Scoring(), np.array([5, 6, 7]))
    assert params.prompt_logprob_token_ids.tolist() == [[6], [7]]
    assert params.skip_reading_prefix_cache is True
    assert params.routed_experts_prompt_start == 3  # nobody asked for them
    assert params.extra_args == {"mine": 1}  # at temperature 1, over all words, there is nothing to adjust
    assert (asked.prompt_logprob_token_ids, asked.extra_args) == (None, {"mine": 1})
    assert scoring_params(asked, Scoring(), np.array([5, 6])).prompt_logprob_token_ids.tolist() == [[6]]
    assert scoring_params(asked, Scoring(), np.array([5])).prompt_logprob_token_ids is None  # nothing before it
    for params in (asked, SimpleNamespace(extra_args=None)):
        assert adjusted(LOGITS, params, 0) is LOGITS


# -- parts of an answer put together ----------------------------------------------------------------------------------
P = 4  # prompt tokens
KEEP_IT: dict[str, Any] = {"include_stop_str_in_output": True}


def decode(ids: Sequence[int]) -> str:
    """Tokens are bytes; what is no character (yet) is shown as tokenizers do."""
    return bytes(ids).decode("utf-8", errors="replace")


def part(raw: bytes, start: int, version: int, reason: str = "length", text: str | None = None) -> CompletionOutput:
    """Tokens ``start`` to ``start + len(raw)`` of an answer; log-prob and row say the place, kept ids the token."""
    places = np.arange(start, start + len(raw))
    rows = places + P - 1 if start else np.arange(P + len(raw) - 1)
    return CompletionOutput(
        index=0,
        token_ids=np.array(list(raw), np.int64),
        text=raw.decode("utf-8", errors="ignore") if text is None else text,
        finish_reason=reason,
        policy_versions=np.full(len(raw), version, np.int32),
        logprobs=-places.astype(np.float32),
        routed_experts=rows[:, None, None].astype(np.uint8),
        kept=KeptIds(np.array(list(raw), np.int32), np.ones(len(raw), np.int32)),
    )


CHARACTERS = "a é€ b".encode()  # of one, two and three bytes


@pytest.mark.parametrize(
    ("params", "first", "rest", "vllms", "raw", "text", "reason"),
    [
        # a stop string across the cut, which vLLM does not see
        ({"stop": "STOP"}, b"one STO", b"P two", ("length", None), b"one STOP", "one ", "stop"),
        ({"stop": ["STOP"]}, b"one S", b"TOP two", ("length", None), b"one STOP", "one ", "stop"),
        ({"stop": ["abcd", "bc"]}, b"ab", b"cdcd", ("length", None), b"abc", "a", "stop"),  # the one that ends first
        ({"stop": "bcd"}, b"aab", b"c", ("length", None), b"aabc", "aabc", "length"),
        # vLLM has let it pass: min_tokens
        ({"stop": "STOP"}, b"STOP one", b" two", ("length", None), b"STOP one two", "STOP one two", "length"),
        ({"stop": "STOP", "min_tokens": 6}, b"S", b"TOP on", ("length", None), b"STOP on", "STOP on", "length"),
        ({"stop": "STOP", "min_tokens": 3}, b"S", b"TOP on", ("length", None), b"STOP", "", "stop"),
        ({"stop": "STOP", **KEEP_IT}, b"one S", b"TOP two", ("length", None), b"one STOP", "one STOP", "stop"),
        # one that vLLM found in the rest
        ({"stop": "."}, b"one ", b"two.", ("stop", "two"), b"one two.", "one two", "stop"),
        # a cut inside a character of three bytes: vLLM was not asked for the rest's text
        ({}, CHARACTERS[:5], CHARACTERS[5:], ("length", ""), CHARACTERS, "a é€ b", "length"),
        ({}, CHARACTERS[:6], CHARACTERS[6:], ("length", ""), CHARACTERS, "a é€ b", "length"),
        # half a character at the end has no text, as in vLLM
        ({}, b"\xc3", b"\xa9\xc3\xbc\xc3", ("length", None), b"\xc3\xa9\xc3\xbc\xc3", "éü", "length"),
        # nor has a token that ends the answer
        ({}, b"\xc3", b"\xa9!", ("stop", ""), "é!".encode(), "é", "stop"),
        (KEEP_IT, b"\xc3", b"\xa9!", ("stop", ""), "é!".encode(), "é!", "stop"),
        ({"stop": "STOP"}, b"\xc3", b"\xa9 and STOP on", ("length", ""), "é and STOP".encode(), "é and ", "stop"),
        # or one whose end is a stop string's
        ({"stop": "é"}, b"a\xc3", b"\xa9 on", ("length", ""), "aé".encode(), "a", "stop"),
    ],
)
def test_two_parts_of_an_answer_are_what_it_would_have_been(
    params: dict[str, Any], first: bytes, rest: bytes, vllms: tuple[str, Any], raw: bytes, text: str, reason: str
) -> None:
    one, two = part(first, 0, 3, "abort"), part(rest, len(first), 4, *vllms)
    output = join(2, one, two, vllm_object(**params), decode)
    check(output, raw, text, len(first), reason)
    if reason == "stop" and vllms[0] == "length":
        assert output.stop_reason in ("STOP", "bc", "é")


def check(output: CompletionOutput, raw: bytes, text: str, first: int, reason: str) -> None:
    assert (output.index, bytes(output.token_ids.tolist()), output.text) == (2, raw, text)
    assert output.finish_reason == reason
    assert output.policy_versions.tolist() == [3] * first + [4] * (len(raw) - first)
    assert output.logprobs.tolist() == [-place for place in range(len(raw))]
    assert output.routed_experts[:, 0, 0].tolist() == list(range(P + len(raw) - 1))
    assert (output.kept.ids.tolist(), output.kept.sizes.tolist()) == (list(raw), [1] * len(raw))


ROWS = np.full((3, 2, 2), 1, np.int8)


@pytest.mark.parametrize(("recorded", "expected"), [(ROWS + 1, ROWS + 1), (None, ROWS)])
def test_a_rest_follows_what_was_recorded_and_else_what_the_user_gave(recorded: Any, expected: Any) -> None:
    asked = Request(request_id="r", sampling_params=None, prompt_token_ids=np.arange(P), routed_experts=ROWS)
    rest = request_for_rest(asked, "r~1", np.arange(P), part(b"ab", 0, 1), recorded)
    assert rest.prompt_token_ids.tolist() == [0, 1, 2, 3, 97, 98]
    assert (rest.routed_experts == expected).all()
    again = request_for_rest(asked, "r~1", np.arange(P), None)
    assert (again.routed_experts == ROWS).all()


def test_a_rest_that_was_cut_before_its_first_token_leaves_the_first_part_as_it_was() -> None:
    one, nothing = part(b"abc", 0, 3, "abort"), part(b"", 3, 4, "abort")
    nothing.routed_experts = nothing.logprobs = None  # as vLLM gives it
    check(join(2, one, nothing, vllm_object(stop="c"), decode), b"abc", "abc", 3, "abort")


def test_a_rest_that_lost_its_cache_was_routed_again() -> None:
    """The other ways in which parts are joined: ``test_fake_model.py``, which joins them by the same function."""
    first, rest = part(b"ab", 0, 1), part(b"cd", 2, 2)
    rest.resume = "live"
    assert join(0, first, rest, vllm_object(), decode, "forced").resume == "live"


def test_the_rest_is_asked_for_with_what_is_left() -> None:
    params = vllm_object(n=3, max_tokens=10, min_tokens=4, seed=100, stop="x")
    rest = sampling_for_rest(params, 2, part(b"abc", 0, 3), decode)
    assert (rest.n, rest.max_tokens, rest.min_tokens, rest.seed, rest.stop) == (1, 7, 1, 102, ["x"])
    assert rest.routed_experts_prompt_start == P + 2
    assert (params.n, params.max_tokens, params.seed) == (3, 10, 100)  # the user's own is left alone
    rest = sampling_for_rest(params, 0, part(b"\xc3", 0, 3), decode)  # cut inside a character: without a text
    assert (rest.detokenize, rest.stop) == (False, None)
    for limit in (2, 3):
        params = vllm_object(max_tokens=limit)
        with pytest.raises(ValueError, match=f"answer 1 to resume has 3 tokens already: max_tokens={limit} must be "):
            sampling_for_rest(params, 1, part(b"abc", 0, 3), decode)


def test_what_depends_on_where_the_answer_began_cannot_be_continued() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    assert can_continue(vllm_object(stop=["x"], seed=3, temperature=0.5))
    grammar: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(regex="a")}
    for stateful in (grammar, {"presence_penalty": 0.1}, {"bad_words": ["two words"]}):
        assert not can_continue(vllm_object(**stateful))
