"""Arguments of the wrapper that are split, started or refused; ``test_vllm_wrapper.py`` passes them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from torchrl_moe.modules.policies.wrapper_arguments import (
    changed_arguments,
    engine_of,
    keeps_routes,
    refuse,
    sampling_parameters_of,
    scorer_of,
    split_arguments,
    tokenizer_of,
)
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

PLAIN: dict[str, Any] = {
    "batching": None,
    "min_batch_size": None,
    "max_batch_size": None,
    "generate": True,
    "input_mode": "text",
    "pad_model_input": None,
    "pad_output": False,
    "return_log_probs": None,
    "return_routed_experts": None,
    "layout": None,
    "num_samples": None,
    "replay": None,
    "temperature": None,
}


def test_what_is_the_engines_is_taken_out_of_the_sampling_parameters() -> None:
    engine, sampling = split_arguments({"actor_index": 1, "temperature": 0.5}, actor_index=None, lora_request=None)
    assert engine == {"actor_index": 1, "lora_request": None}
    assert sampling == {"temperature": 0.5}
    engine, sampling = split_arguments({"on_resume": "live"}, actor_index=1)  # no argument of the wrapper's own
    assert (engine, sampling) == ({"actor_index": 1, "on_resume": "live"}, {})


def test_the_same_argument_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="actor_index: given twice"):
        split_arguments({"actor_index": 1}, actor_index=0, lora_request=None)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"generate": False, "replay": "R3"}, "text may be encoded to other tokens"),
        ({"generate": False, "num_samples": 2}, "num_samples=2 is for generation"),
        ({"generate": False, "return_log_probs": False}, "return_log_probs must be True"),
        ({"pad_output": 1}, "pad_output must be a boolean, got 1"),
        ({"input_mode": "image"}, "must be one of"),
        ({"pad_model_input": True}, "without padding"),
        ({"layout": 3}, "layout must be None"),
        ({"num_samples": 0}, "at least 1, got 0"),
    ],
)
def test_an_invalid_value_is_refused(bad: dict[str, Any], words: str) -> None:
    refuse(PLAIN)
    with pytest.raises(ValueError, match=words):
        refuse({**PLAIN, **bad})


def test_an_engine_is_itself_and_anything_else_is_refused() -> None:
    with FakeAsyncVLLM() as engine:
        assert engine_of(engine) is engine
    with pytest.raises(
        TypeError, match=r"model must be an AsyncVLLM, a folder .* got builtins\.int\. .*AsyncVLLM\.connect"
    ):
        engine_of(3)


@pytest.mark.parametrize("name", ["vllm.entrypoints.llm.LLM", "torchrl.modules.llm.backends.vllm.AsyncVLLM"])
def test_the_engines_of_others_are_refused_by_name(name: str) -> None:
    module, _, cls = name.rpartition(".")
    theirs = type(cls, (), {"__module__": module})()
    with pytest.raises(TypeError, match=rf"got {re.escape(name)}\. AsyncVLLM\.from_pretrained"):
        engine_of(theirs)


def test_sampling_parameters_have_what_rl_needs() -> None:
    needs = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert sampling_parameters_of({}, None, True) == {"logprobs": 0, **needs}
    assert sampling_parameters_of({"logprobs": 2}, 3, False) == {"logprobs": 2, "n": 3, **needs}
    with pytest.raises(ValueError, match=r"num_samples=2 differs from generate_kwargs\['n'\]=3"):
        sampling_parameters_of({"num_return_sequences": 3}, 2, True)


SCORING: dict[str, Any] = {
    "generate": False,
    "input_mode": "tokens",
    "replay": None,
    "temperature": None,
    "input_key": None,
    "tokens_key": "tokens",
    "masks_key": "masks",
    "routed_experts_key": "routed_experts",
    "timeout_seconds": None,
    "use_tqdm": False,
}


@pytest.mark.parametrize(
    ("routes", "arguments", "replay"),
    [
        (True, {}, "R3"),
        (False, {}, "none"),  # a dense model
        (True, {"input_mode": "text"}, "none"),  # routes belong to tokens
        (True, {"replay": "none"}, "none"),
        (False, {"replay": "R3"}, "R3"),  # refused with the batch, by the scorer
    ],
)
def test_tokens_follow_recorded_experts_where_an_engine_captures_some(
    routes: bool, arguments: dict[str, Any], replay: str
) -> None:
    with FakeAsyncVLLM() if routes else FakeAsyncVLLM(layout=None) as engine:
        scorer = scorer_of(engine, {**SCORING, **arguments}, {})
        assert scorer is not None
        assert scorer.replay == replay
        assert scorer_of(engine, {**SCORING, "generate": True}, {}) is None


def test_a_new_version_changes_what_goes_with_its_changes() -> None:
    given = {**PLAIN, "input_key": "mine", "num_samples": 2, "return_log_probs": False}
    assert changed_arguments(given, {}) == given
    assert changed_arguments(given, {"input_mode": "text"}) == given  # the same as before
    assert changed_arguments(given, {"input_mode": "tokens"}) == {**given, "input_mode": "tokens", "input_key": None}
    scoring = {"generate": False, "input_key": None, "num_samples": None, "return_log_probs": None}
    assert changed_arguments(given, {"generate": False}) == {**given, **scoring}
    assert changed_arguments(given, {"generate": False, "num_samples": 3})["num_samples"] == 3
    with pytest.raises(TypeError, match=r"get_new_version got unknown arguments \['x'\]"):
        changed_arguments(given, {"x": 1})


def test_a_tokenizer_is_the_engines_unless_one_is_given() -> None:
    mine = ByteTokenizer()
    with FakeAsyncVLLM() as engine:
        assert tokenizer_of(mine, engine) is mine
        assert tokenizer_of(None, engine) is engine.get_tokenizer()


def test_routes_are_kept_if_there_are_any() -> None:
    with FakeAsyncVLLM() as engine, FakeAsyncVLLM(layout=None) as dense:
        assert keeps_routes(None, engine)
        assert not keeps_routes(False, engine)
        assert not keeps_routes(None, dense)
        with pytest.raises(ValueError, match="captures no routes"):
            keeps_routes(True, dense)
