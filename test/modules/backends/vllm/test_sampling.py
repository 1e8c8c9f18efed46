"""What users pass as sampling parameters: as vLLM gets it, and what a real engine makes of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from support.engines import ADAPTED
from torchrl_moe._compat import vllm_client_errors
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.process.wire import from_plain, to_plain
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.backends.vllm.sampling import SamplingParamsBuilder, check_bad_words
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


def test_a_mapping_and_an_object_mean_the_same() -> None:
    fields = {"max_tokens": 3, "n": 2, "temperature": 0.5, "logprobs": 0, "stop": ["x"]}
    one, two = build(fields), build(vllm_object(**fields))
    assert one == two
    assert (one.max_tokens, one.n, one.temperature, one.stop) == (3, 2, 0.5, ["x"])


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
    there = build(from_plain(to_plain(spec)))
    assert there == build(spec)
    assert (there.structured_outputs.regex, there.repetition_detection.min_count) == ("a+", 3)
    assert there.extra_args == {"mine": [1, (2, 3)]}


@pytest.mark.parametrize("spec", [None, {}])
def test_nothing_means_vllms_defaults(spec: Any) -> None:
    params = build(spec)
    assert (params.max_tokens, params.n, params.logprobs) == (16, 1, None)


def test_an_object_of_the_caller_is_left_as_it_was() -> None:
    theirs = vllm_object(logprobs=0)
    ours = build(theirs, {"regex": "a"})
    assert theirs == vllm_object(logprobs=0)
    assert ours is not theirs


@pytest.mark.parametrize(("logprobs", "is_flat"), [(None, False), (0, True)])
def test_logprobs_come_in_the_flat_container(logprobs: int | None, is_flat: bool) -> None:
    assert build({"logprobs": logprobs}).flat_logprobs is is_flat


@pytest.mark.parametrize("wrap", [dict, vllm_object])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 5),
        ("logprobs", -1),
        ("prompt_logprobs", 0),
        ("prompt_logprob_token_ids", [[1], [2]]),
        ("routed_experts_prompt_start", 3),
    ],
)
def test_what_no_completion_carries_is_refused(wrap: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams\\({name}={re.escape(repr(value))}\\): a completion has the"):
        build(wrap(**{name: value}))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.9}, "top_p"),
        ({"min_p": 0.1}, "min_p"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_an_engine_that_does_not_name_words_gives_no_log_probs_over_less_than_all(
    fields: dict[str, Any], name: str
) -> None:
    silent = SamplingParamsBuilder(names_words=False)
    with pytest.raises(
        ValueError, match=f"^{name}=.* leaves vocabulary entries out, and this engine does not say which"
    ):
        silent({**fields, "logprobs": 0})
    assert silent(fields).logprobs is None
    assert build({**fields, "logprobs": 0}).logprobs == 0


def test_all_words_need_no_names() -> None:
    everything = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "logprobs": 0, "temperature": 0.6}
    assert SamplingParamsBuilder(names_words=False)(everything).temperature == 0.6


@pytest.mark.parametrize(
    ("mode", "temperature", "words"),
    [
        ("raw_logprobs", 0.7, r"^temperature=0\.7, and this engine's log-probs are of temperature 1"),
        ("raw_logits", 1.0, r"^logprobs=0, and this engine gives logits instead of log-probs"),
        ("processed_logits", 1.0, r"^logprobs=0, and this engine gives logits instead of log-probs"),
    ],
)
def test_log_probs_are_of_the_distribution_that_is_sampled_from(mode: str, temperature: float, words: str) -> None:
    builder = SamplingParamsBuilder(names_words=False, logprobs_mode=mode)
    with pytest.raises(ValueError, match=f"{words}.*leave out logprobs_mode, or logprobs"):
        builder({"temperature": temperature, "logprobs": 0})
    assert builder({"temperature": temperature}).logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])  # greedy: nobody trains on it
def test_raw_log_probs_are_right_where_temperature_changes_nothing(temperature: float) -> None:
    builder = SamplingParamsBuilder(names_words=False, logprobs_mode="raw_logprobs")
    assert builder({"temperature": temperature, "logprobs": 0}).logprobs == 0


def test_prompt_logprobs_are_left_alone_since_they_switch_the_prefix_cache_off() -> None:
    assert build({"logprobs": 0}).prompt_logprobs is None


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"max_token": 3}, TypeError, "max_token"),
        ({"temperature": -1.0}, Exception, "temperature must be non-negative"),
        ({"n": 0}, Exception, "n must be at least 1"),
        (5, ValueError, r"sampling_params must be vllm\.SamplingParams or a mapping, got int"),
        ("greedy", ValueError, r"sampling_params must be vllm\.SamplingParams or a mapping, got str"),
    ],
)
def test_what_vllm_does_not_know_is_refused(spec: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        build(spec)
    assert isinstance(caught.value, vllm_client_errors())  # a refusal, not a failure of the engine


@pytest.mark.parametrize("wrap", [dict, vllm_object])
def test_a_request_may_have_a_seed(wrap: Callable[..., Any]) -> None:
    assert build(wrap(seed=3)).seed == 3


def test_where_no_cached_prefix_may_be_read_no_request_reads_one() -> None:
    assert SamplingParamsBuilder(reads_cache=False)({}).skip_reading_prefix_cache is True
    assert not build({}).skip_reading_prefix_cache


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


@pytest.mark.parametrize("options", [{"regexp": "a+"}, {}, {"regex": "a+", "choice": ["a"]}, "a+"])
def test_guided_options_that_vllm_does_not_know_are_refused(options: Any) -> None:
    with pytest.raises(vllm_client_errors(), match=r"structured outputs|guided_options"):
        build({}, options)


def test_one_object_is_built_per_distinct_value() -> None:
    builder, first, second = SamplingParamsBuilder(), {"max_tokens": 1}, {"max_tokens": 1}
    one = builder(first)
    assert builder(first) is one
    other = builder(second)
    assert other is not one
    assert builder(second, {"regex": "a"}) is not other
    assert builder(None) is builder(None)


def test_an_address_that_is_used_again_is_not_taken_for_the_old_value() -> None:
    builder = SamplingParamsBuilder()
    for max_tokens in range(1, 200):
        assert builder({"max_tokens": max_tokens}).max_tokens == max_tokens


def test_a_refusal_is_not_remembered_as_the_answer() -> None:
    builder, bad = SamplingParamsBuilder(), {"max_token": 3}
    builder({"max_tokens": 2})
    for _ in range(2):
        with pytest.raises(TypeError):
            builder(bad)


def test_a_refusal_leaves_the_answer_before_it_alone() -> None:
    builder, good = SamplingParamsBuilder(names_words=False), {"max_tokens": 2}
    assert builder(good).max_tokens == 2
    with pytest.raises(ValueError, match="leaves vocabulary entries out"):
        builder({"top_k": 3, "logprobs": 0, "max_tokens": 9})
    assert builder(good).max_tokens == 2


# -- what a real engine makes of it -----------------------------------------------------------------------------------

IDS = [72, 105, 44, 32, 119, 111, 114, 108, 100]


@pytest.mark.engine("qwen3_moe")
def test_guided_answers_are_what_was_asked_for(engine: AsyncVLLM) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "name": {"enum": ["ab", "cd"]}},
        "required": ["ok", "name"],
        "additionalProperties": False,
    }

    def ask(**options: Any) -> str:
        params = {"max_tokens": 64, "logit_bias": dict.fromkeys(b"\t\n\r ", -100.0)}  # JSON may begin with any space
        completion = engine.generate(IDS, params, use_tqdm=False, guided_options_request=options)
        assert isinstance(completion, Completion)
        return completion.outputs[0].text

    assert re.fullmatch("[xy]{2,5}", ask(regex="[xy]{2,5}"))
    assert ask(choice=["yes", "no"]) in ("yes", "no")
    answer = json.loads(ask(json=schema))
    assert answer.keys() == {"ok", "name"}
    assert isinstance(answer["ok"], bool)
    assert answer["name"] in ("ab", "cd")


@pytest.mark.engine("qwen3_moe", **ADAPTED)
def test_a_request_of_lower_priority_value_is_served_first(engine: AsyncVLLM) -> None:
    async def attempt() -> list[str]:
        finished: list[str] = []

        async def ask(name: str, priority: int, max_tokens: int) -> None:
            params = {"max_tokens": max_tokens, "ignore_eos": True}
            await engine.agenerate(IDS, params, priority=priority)
            finished.append(name)

        blocker = asyncio.create_task(ask("running", 0, 400))  # the only one that the engine runs at a time
        while not engine.stats()[0]["running"] and not blocker.done():
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(ask(f"priority {priority}", priority, 2)) for priority in (7, 3, 5)]
        while engine.stats()[0]["waiting"] < 3 and not blocker.done():
            await asyncio.sleep(0.01)
        in_time = not blocker.done()
        await asyncio.gather(blocker, *waiting)
        return finished if in_time else []

    for _ in range(8):  # on a busy machine the blocker may be done before the others have arrived
        if finished := asyncio.run(attempt()):
            assert finished == ["running", "priority 3", "priority 5", "priority 7"]
            return
    pytest.fail("the blocker was always done before the others had arrived")
