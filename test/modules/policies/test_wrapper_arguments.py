"""Arguments of the wrapper that are split, started or refused; ``test_vllm_wrapper.py`` passes them."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_moe.modules import AsyncVLLM, vLLMWrapper
from torchrl_moe.modules.policies.vllm_wrapper import overridden, request_arguments, sampling_params_of


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"generate": False, "replay": "R3"}, "text may be encoded to other tokens"),
        ({"generate": False, "replay": "R2"}, "an engine records no R2"),
        ({"temperature": 0.5}, "temperature=0.5 is for scoring"),
        ({"pad_model_input": True}, "without padding"),
        ({"layout": 3}, "layout must be None"),
        ({"batching": True}, "batching must be None, got True: .* the engine batches the requests"),
        ({"chat_template_name": "mine"}, "chat_template_name='mine' must be one of TorchRL's"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs must be a mapping of names to values, got 3"),
    ],
)
def test_invalid_values_start_no_engine(monkeypatch: pytest.MonkeyPatch, bad: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", lambda path: pytest.fail("an engine was started"))
    with pytest.raises((TypeError, ValueError), match=message):
        vLLMWrapper("no/such/folder", **{"input_mode": "text", **bad})


@pytest.mark.parametrize(
    "name", ["builtins.int", "vllm.entrypoints.llm.LLM", "torchrl.modules.llm.backends.vllm.AsyncVLLM"]
)
def test_the_engines_of_others_are_refused_by_name(name: str) -> None:
    module, _, cls = name.rpartition(".")
    theirs = type(cls, (), {"__module__": module})()
    told = rf"model must be an AsyncVLLM, .*, got {re.escape(name)}\. AsyncVLLM\.from_pretrained"
    with pytest.raises(TypeError, match=told):
        vLLMWrapper(theirs)


# -- TorchRL's common names become vLLM's, and what vLLM cannot do is refused by name


@pytest.mark.parametrize(
    ("given", "params"),
    [
        (None, {}),
        ({"max_new_tokens": 8, "num_return_sequences": 3}, {"max_tokens": 8, "n": 3}),
        ({"max_new_tokens": 1, "max_tokens": 2}, {"max_tokens": 2}),  # vLLM's own name wins in either order
        ({"n": 2, "num_return_sequences": 1, "stop": "a", "stop_sequences": "b"}, {"n": 2, "stop": "a"}),
        ({"stop_sequences": ["a"], "top_p": 0.9, "top_k": 5}, {"stop": ["a"], "top_p": 0.9, "top_k": 5}),
        ({"repetition_penalty": 1.1, "min_tokens": 2}, "the same"),  # and those that are vLLM's own
        ({"do_sample": False, "temperature": 0}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": None}, {"temperature": 0.0}),
        ({"do_sample": None, "temperature": 0.5}, {"temperature": 0.5}),
        ({"logprobs": True}, {"logprobs": 0}),  # a switch, or a number
        ({"logprobs": False}, {"logprobs": None}),
        ({"logprobs": 5}, "the same"),
        ({"num_beams": None, "length_penalty": 1.0, "early_stopping": False}, {}),
    ],
)
def test_names_are_mapped(given: dict[str, Any] | None, params: Any) -> None:
    before = copy.copy(given)
    found = sampling_params_of(given)
    assert found == (given if params == "the same" else params)
    assert type(found.get("logprobs")) is not bool
    assert given == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -0.1}, "Temperature must be non-negative"),
        ({"do_sample": False, "temperature": 0.7}, r"When do_sample=False .* temperature must be 0.*temperature=0\.7"),
        *(
            ({name: value}, rf"generate_kwargs\['{name}'\]={value!r}: vLLM samples and has no beam search")
            for name, value in (("num_beams", 2), ("length_penalty", 0.5), ("early_stopping", True))
        ),
    ],
)
def test_a_value_out_of_its_range_and_beam_search_are_refused(given: dict[str, Any], words: str) -> None:
    for check in (sampling_params_of, lambda kwargs: overridden({}, kwargs)):
        with pytest.raises(ValueError, match=words):
            check(given)


@pytest.mark.parametrize(
    ("params", "call", "merged"),
    [
        ({"max_tokens": 8, "n": 2}, {"max_new_tokens": 4}, {"max_tokens": 4, "n": 2}),
        ({"temperature": 0.7}, {"do_sample": False}, {"temperature": 0.0}),
        ({"temperature": 0.0, "n": 1}, {"do_sample": True}, {"n": 1}),
        ({"temperature": 0.0}, {"do_sample": True, "temperature": 0.3}, {"temperature": 0.3}),
        ({"temperature": 0.7}, {"do_sample": True}, {"temperature": 0.7}),
    ],
)
def test_a_call_changes_what_it_names(params: dict[str, Any], call: dict[str, Any], merged: dict[str, Any]) -> None:
    before = dict(params)
    assert overridden(params, call) == merged
    assert params == before


# -- what a batch says of its requests, in every form in which a TensorDict holds it


def batch(key: str, value: Any) -> list[TensorDictBase]:
    td = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    td.set(key, value)
    return list(td.unbind(0))


def lazy(key: str, *values: Any) -> list[TensorDictBase]:
    return list(lazy_stack([TensorDict({key: value}) for value in values]).unbind(0))


NUMBERS, TEXTS, CONTEXTS = [3, 4], ["a", "b"], [{"k": 1}, {"k": 2}]


@pytest.mark.parametrize(
    ("samples", "arguments"),
    [
        (batch("group_id", torch.tensor([[3], [4]], dtype=torch.int8)), {"group_ids": NUMBERS}),
        (batch("group_id", NonTensorStack(NonTensorStack(3), NonTensorStack(4))), {"group_ids": NUMBERS}),
        (lazy("group_id", 3, torch.tensor([4])), {"group_ids": NUMBERS}),
        (batch("session_id", TEXTS), {"session_ids": TEXTS}),
        (lazy("session_id", "a", NonTensorData("b")), {"session_ids": TEXTS}),
        (batch("request_context", CONTEXTS), {"request_context": CONTEXTS}),
        (batch("request_context", TensorDict(k=torch.tensor([1, 2]), batch_size=[2])), {"request_context": CONTEXTS}),
        (lazy("request_context", CONTEXTS[0], NonTensorData(CONTEXTS[1])), {"request_context": CONTEXTS}),
        (batch("min_version", NonTensorData(4, batch_size=[2])), {"min_version": [4, 4]}),  # one value for all
        (batch("priority", torch.tensor([-1, 2])), {"priority": [-1, 2]}),
        (batch("priority", NonTensorStack(None, 2)), {"priority": [0, 2]}),
        ([TensorDict({"text": "a"}), TensorDict()], {}),
    ],
)
def test_values_are_read_in_every_form(samples: list[TensorDictBase], arguments: dict[str, Any]) -> None:
    assert request_arguments(samples) == arguments


def test_unset_values_and_missing_keys() -> None:
    for key, name in (("session_id", "session_ids"), ("group_id", "group_ids"), ("min_version", "min_version")):
        assert request_arguments(batch(key, torch.tensor([-1, 0]))) == {name: [None, 0]}
        assert request_arguments(batch(key, NonTensorStack(None, 0))) == {name: [None, 0]}
    stack = lazy_stack([TensorDict({"priority": 2}), TensorDict({"group_id": "g"}), TensorDict()])
    assert request_arguments(list(stack.unbind(0))) == {"priority": [2, 0, 0], "group_ids": [None, "g", None]}
    for key, two in (("session_id", NonTensorStack("c", "d")), ("group_id", torch.tensor([3, 4]))):
        with pytest.raises(ValueError, match=rf"sample 1: '{key}' is \['?\w'?, '?\w'?\]"):
            request_arguments([TensorDict(), TensorDict({key: two})])


def test_every_common_name_of_torchrl_is_known_to_vllm_afterwards() -> None:
    fields = {"n", "max_tokens", "stop", "temperature", "top_p", "top_k", "repetition_penalty", "skip_special_tokens"}
    off = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
    given = {name: off.get(name, 1) for name in LLMWrapperBase.COMMON_GENERATION_PARAMS}
    assert set(sampling_params_of(given)) == fields | {"logprobs"}
