"""One answer as it grows, its sampling parameters and its text; every value worked out by hand."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import CompletionOutput, KeptIds
from torchrl_moe.modules.backends.transformers import answer as sampling
from torchrl_moe.modules.backends.transformers.answer import Answer, Draw, LockedTokenizer, Sampling, read_sampling
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer

# -- text --------------------------------------------------------------------------------------------------------------


TOKENIZER = ByteTokenizer()


def test_text_becomes_ids_and_ids_become_text() -> None:
    words = LockedTokenizer(TOKENIZER)
    assert words.encode("Hi") == [72, 105]
    stream = words.stream([72, 105], True)
    assert [stream.step(token) for token in (33, 0xC3, 0xA9, 65)] == ["!", "", "é", "A"]  # é has two bytes
    assert stream.step(TOKENIZER.eos_token_id) == ""
    assert stream.step(5000) == ""  # a model may have more words than its tokenizer
    assert words.stream([5000, 72], True).step(65) == "A"
    shown = words.stream([], False)
    assert shown.step(TOKENIZER.eos_token_id) == TOKENIZER.eos_token


@pytest.mark.parametrize(("named", "more"), [(None, set()), (7, {7}), ([TOKENIZER.eos_token_id, 7, 9], {7, 9})])
def test_the_models_own_configuration_may_name_more_tokens_that_end(named: object, more: set[int]) -> None:
    words = LockedTokenizer(TOKENIZER, SimpleNamespace(eos_token_id=named))
    assert words.eos == TOKENIZER.eos_token_id
    assert words.more_eos == more


# -- sampling parameters -----------------------------------------------------------------------------------------------


def vllm_fields() -> dict[str, Any]:
    """Field -> default of vLLM's ``SamplingParams``, read from its source, where that is a literal."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "sampling_params.py").read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    named = {node.target.id: node.value for node in fields if not node.target.id.startswith("_")}  # type: ignore[union-attr]
    return {name: value.value if isinstance(value, ast.Constant) else ... for name, value in named.items()}


@pytest.mark.needs_vllm
def test_each_field_of_vllms_is_served_or_refused_or_changes_nothing() -> None:
    fields = vllm_fields()
    known = sampling.KNOWN | sampling.REFUSED.keys() | sampling.WITHOUT_EFFECT
    assert fields.keys() - known == set()
    same = {name: value for name, value in fields.items() if name in sampling.KNOWN}
    ours = {name: getattr(Sampling(), name) for name in same}
    ours |= {"stop": None, "stop_token_ids": None, "logprobs": None}
    assert ours == same


@pytest.mark.needs_vllm
def test_all_defaults_of_vllms_may_be_given() -> None:
    """As they are when a user passes a ``SamplingParams``."""
    given = {name: value for name, value in vllm_fields().items() if value is not ...}
    assert read_sampling({**given, "stop": [], "output_kind": 2, "bad_words": []}) == Sampling()
    assert read_sampling(None) == Sampling()


def test_what_means_the_same_is_the_same() -> None:
    assert read_sampling({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}) == Sampling(temperature=0.0)
    for low in (1e-3, 1e-6, 5e-324):  # as vLLM raises them; only 0 is greedy
        assert read_sampling({"temperature": low, "top_k": 5}) == Sampling(temperature=0.01, top_k=5)
    assert read_sampling({"top_k": -1, "seed": -1, "stop": "x"}) == Sampling(stop=("x",))
    assert read_sampling({"logprobs": 0}).logprobs
    assert not read_sampling({"logprobs": None}).logprobs
    assert read_sampling({"max_tokens": None}).max_tokens is None
    assert [read_sampling(one).leaves_ids_out for one in ({}, {"top_k": 5}, {"temperature": 0, "top_k": 5})] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"bad_words": ["a"]}, "does not serve bad_words=.*; vLLM does"),
        ({"logit_bias": {1: 2.0}}, "does not serve logit_bias"),
        ({"structured_outputs": {"regex": "a"}}, "does not serve structured_outputs"),
        ({"nonsense": 1}, "unknown nonsense; known: detokenize, frequency_penalty"),
        ({"stop": [""]}, "stop.* must be "),
        ({"stop": b"x"}, "stop.* must be "),
        ({"top_p": 0}, "top_p.* must be "),  # the service's checks, see its tests
        ({"logprobs": 5}, "logprobs=5: a completion has the log-probs of its sampled tokens only"),
        ({"temperature": "hot"}, "sampling_params: "),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 is more than max_tokens=4"),
        ({"n": 2, "temperature": 0}, "n=2 with temperature=0 would give one answer several times"),
        ({"stop": "a", "detokenize": False}, "stop strings need detokenize=True"),
        ("greedy", "must be a mapping, got str"),
    ],
)
def test_what_is_invalid_or_not_served_is_refused(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_sampling(spec)


# -- answers -----------------------------------------------------------------------------------------------------------


EOS = TOKENIZER.eos_token_id
LOCKED = LockedTokenizer(TOKENIZER)
LAYOUT = RoutingLayout(num_layers=2, moe_layers=(1,), top_k=2, num_experts=8)
NOTHING = np.empty(0, np.int32)


def answer(max_model_len: int = 100, layout: RoutingLayout | None = LAYOUT, index: int = 0, **params: Any) -> Answer:
    return Answer([1, 2, 3], read_sampling(params), index, LOCKED, max_model_len, layout)


def grow(one: Answer, tokens: Any, version: int = 0, step: Any = NOTHING) -> Answer:
    """Add tokens, or the bytes of a text, until it ends."""
    for token in tokens.encode() if isinstance(tokens, str) else tokens:
        if one.finish_reason is None:
            one.add(Draw(token, -float(token), np.array(step, np.int32)), version)
    return one


def row(*experts: int) -> Any:
    """A row of the second layer; the first is dense."""
    return [[-1, -1], list(experts)]


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "tokens", "count", "reason", "stop_reason", "text"),
    [
        ({"max_tokens": 3}, "abcd", 3, "length", None, "abc"),
        ({}, [97, EOS, 98], 2, "stop", None, "a"),
        ({"ignore_eos": True, "max_tokens": 3}, [97, EOS, 98], 3, "length", None, "ab"),
        ({"stop_token_ids": [99]}, "abcd", 3, "stop", 99, "ab"),
        ({"stop_token_ids": [99], "include_stop_str_in_output": True}, "abcd", 3, "stop", 99, "abc"),
        ({"stop": "bc"}, "abcd", 3, "stop", "bc", "a"),
        ({"stop": ["cd", "bcd"]}, "abcd", 4, "stop", "bcd", "a"),  # of two that end together the longer begins first
        ({"stop": "bc", "include_stop_str_in_output": True}, "abcd", 3, "stop", "bc", "abc"),
        ({"stop": "é"}, "aéb", 3, "stop", "é", "a"),  # the second of its two bytes ends it
        ({"stop": "b", "min_tokens": 2}, "abcb", 4, "stop", "b", "abc"),  # the first came too early
        ({"stop": "b", "max_tokens": 2}, "ab", 2, "stop", "b", "a"),  # as the last one that there may be
        ({"max_tokens": 2}, [97, EOS], 2, "stop", None, "a"),
        ({"detokenize": False, "max_tokens": 2}, "ab", 2, "length", None, ""),
        ({"max_tokens": 2}, [97, 0xC3], 2, "length", None, "a"),  # half a character is not shown
        ({"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 1}, [EOS], 1, "length", None, "<eos>"),
    ],
)
def test_an_answer_ends(
    params: dict[str, Any], tokens: Any, count: int, reason: str, stop_reason: Any, text: str
) -> None:
    output = grow(answer(**params), tokens).output(True)
    assert len(output.token_ids) == count
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
    assert output.text.replace(TOKENIZER.eos_token, "<eos>") == text


def test_it_ends_where_the_model_does() -> None:
    one = grow(answer(max_model_len=7, max_tokens=None), "abcdefgh")
    assert (len(one.tokens), one.finish_reason, one.longest) == (4, "length", 7)
    assert answer(max_model_len=7, max_tokens=2).longest == 5


# -- what is known of its tokens --------------------------------------------------------------------------------------


def test_rows_are_of_all_tokens_but_the_last_as_engines_give_them() -> None:
    one = answer()
    assert one.output(True).routed_experts is None  # nothing was generated
    one.add_rows(np.array([row(0, 1), row(2, 3), row(4, 5)], np.int16))
    grow(one, [10])
    one.add_rows(np.array([row(6, 7)], np.int16))
    grow(one, [11])
    rows = one.output(True).routed_experts
    assert rows is not None
    assert rows.dtype == np.uint8
    assert rows.tolist() == [[[0, 0], pair] for pair in ([0, 1], [2, 3], [4, 5], [6, 7])]
    assert one.output(False).routed_experts is None
    assert answer(layout=None).output(True).routed_experts is None


# -- reading again ----------------------------------------------------------------------------------------------------


def given(**fields: Any) -> CompletionOutput:
    defaults: dict[str, Any] = {
        "index": 0,
        "token_ids": np.array([97, 0xC3]),
        "text": "a",
        "finish_reason": "abort",
        "policy_versions": np.array([1, 2], np.int32),
        "logprobs": np.array([-0.5, -1.5], np.float32),
        "routed_experts": np.array([[[0, 0], [0, 1]]] * 4, np.uint8),
        "kept": KeptIds(np.array([97], np.int32), np.array([1, 0], np.int32)),
    }
    return CompletionOutput(**{**defaults, **fields})


def test_it_continues_from_what_there_was() -> None:
    one = answer(logprobs=0, max_tokens=4, stop="éb")
    one.go_on_from(given())
    one.note_read()
    rows = one.rows_to_follow()
    assert rows is not None
    assert rows[:, 0].tolist() == [[-1, -1]] * 5  # 0 on a dense layer is no route
    assert rows[:, 1].tolist() == [[0, 1]] * 4 + [[-1, -1]]
    one.add_rows(np.array([row(7, 7)] * 4 + [row(2, 3)], np.int16))
    grow(one, [0xA9], 5, [0, 0xA9, 1])
    one.add_rows(np.array([row(4, 5)], np.int16))
    output = grow(one, [98], 5).output(True)
    assert output.token_ids.tolist() == [97, 0xC3, 0xA9, 98]
    assert output.policy_versions.tolist() == [1, 2, 5, 5]
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [-0.5, -1.5, -0xA9, -98]
    assert output.kept is not None
    assert (output.kept.ids.tolist(), output.kept.sizes.tolist()) == ([97, 0xA9, 1], [1, 0, 2, 0])
    assert output.routed_experts is not None
    assert output.routed_experts[:, 1].tolist() == [[0, 1]] * 4 + [[2, 3], [4, 5]]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "éb")  # across the cut
    assert output.resume == "forced"


def test_what_had_no_routes_and_log_probs_continues_without() -> None:
    one = answer(logprobs=0)
    one.go_on_from(given(routed_experts=None, logprobs=None, kept=None))
    one.note_read()
    assert one.rows_to_follow() is None
    one.add_rows(np.array([row(0, 1)] * 5, np.int16))
    output = grow(one, [98]).output(True)
    assert output.routed_experts is output.logprobs is output.kept is None
    assert (output.resume, len(output.token_ids)) == ("live", 3)
