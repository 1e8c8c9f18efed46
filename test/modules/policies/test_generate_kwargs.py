"""TorchRL's common names become vLLM's, and what vLLM cannot do is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_moe.modules.policies.wrapper_arguments import engine_arguments_of, overridden, sampling_params_of


@pytest.mark.parametrize(
    ("given", "params"),
    [
        (None, {}),
        ({}, {}),
        ({"max_new_tokens": 8}, {"max_tokens": 8}),
        ({"num_return_sequences": 3}, {"n": 3}),
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"skip_special_tokens": True}, {"skip_special_tokens": True}),
        ({"min_tokens": 2, "stop_token_ids": [7]}, {"min_tokens": 2, "stop_token_ids": [7]}),  # vLLM's own
    ],
)
def test_names_are_mapped(given: dict[str, Any] | None, params: dict[str, Any]) -> None:
    assert sampling_params_of(given) == params


def test_arguments_of_the_engine_are_no_sampling_parameters() -> None:
    given = {"lora_request": None, "max_new_tokens": 8, "actor_index": 0, "on_resume": "live"}
    engine = {"actor_index": 0, "lora_request": None, "on_resume": "live"}
    assert engine_arguments_of(given) == (engine, {"max_new_tokens": 8})
    assert len(given) == 4
    assert engine_arguments_of(None) == ({}, {})


@pytest.mark.parametrize(
    ("common", "own"), [("max_new_tokens", "max_tokens"), ("num_return_sequences", "n"), ("stop_sequences", "stop")]
)
def test_vllms_own_name_wins_in_either_order(common: str, own: str) -> None:
    assert sampling_params_of({common: 1, own: 2}) == {own: 2}
    assert sampling_params_of({own: 2, common: 1}) == {own: 2}


def test_the_argument_is_left_as_it_was() -> None:
    given = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "logprobs": True}
    sampling_params_of(given)
    assert given == {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "logprobs": True}


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": None}, {"temperature": 0.0}),
        ({"do_sample": True}, {}),
        ({"do_sample": None, "temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
    ],
)
def test_greedy_is_temperature_zero(given: dict[str, Any], params: dict[str, Any]) -> None:
    assert sampling_params_of(given) == params


def test_greedy_with_a_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match=r"When do_sample=False .* temperature must be 0.*temperature=0\.7"):
        sampling_params_of({"do_sample": False, "temperature": 0.7})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -0.1}, "Temperature must be non-negative"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1"),
        ({"top_k": 0}, "top_k must be positive"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
    ],
)
def test_a_value_out_of_its_range_is_refused_as_by_torchrl(given: dict[str, Any], words: str) -> None:
    for check in (sampling_params_of, lambda kwargs: overridden({}, kwargs)):
        with pytest.raises(ValueError, match=words):
            check(given)


@pytest.mark.parametrize(("given", "params"), [(True, 0), (False, None), (0, 0), (5, 5)])
def test_log_probs_as_a_switch_or_a_number(given: Any, params: Any) -> None:
    mapped = sampling_params_of({"logprobs": given})["logprobs"]
    assert (mapped, type(mapped)) == (params, type(params))


@pytest.mark.parametrize(("name", "value"), [("num_beams", 2), ("length_penalty", 0.5), ("early_stopping", True)])
def test_beam_search_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"generate_kwargs\['{name}'\]={value!r}: vLLM samples and has no beam search"
    ):
        sampling_params_of({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 1), ("num_beams", None), ("length_penalty", 1.0), ("early_stopping", False)],
)
def test_beam_search_that_is_off_leaves_no_trace(name: str, value: Any) -> None:
    assert sampling_params_of({name: value, "max_tokens": 3}) == {"max_tokens": 3}


def test_every_common_name_of_torchrl_is_known_to_vllm_afterwards() -> None:
    fields = {"n", "max_tokens", "stop", "temperature", "top_p", "top_k", "repetition_penalty", "skip_special_tokens"}
    off = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
    given = {name: off.get(name, 1) for name in LLMWrapperBase.COMMON_GENERATION_PARAMS}
    assert set(sampling_params_of(given)) == fields | {"logprobs"}


@pytest.mark.parametrize(
    ("params", "call", "merged"),
    [
        ({"max_tokens": 8, "n": 2}, {}, {"max_tokens": 8, "n": 2}),
        ({"max_tokens": 8, "n": 2}, {"max_new_tokens": 4}, {"max_tokens": 4, "n": 2}),
        ({"temperature": 0.7}, {"do_sample": False}, {"temperature": 0.0}),
        ({"temperature": 0.0, "n": 1}, {"do_sample": True}, {"n": 1}),
        ({"temperature": 0.0}, {"do_sample": True, "temperature": 0.3}, {"temperature": 0.3}),
        ({"temperature": 0.7}, {"do_sample": True}, {"temperature": 0.7}),
        ({}, {"do_sample": True}, {}),
    ],
)
def test_a_call_changes_what_it_names(params: dict[str, Any], call: dict[str, Any], merged: dict[str, Any]) -> None:
    before = dict(params)
    assert overridden(params, call) == merged
    assert params == before
