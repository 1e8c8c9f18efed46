"""Sampling parameters: vLLM's names, defaults and limits; what is not served is refused by name."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from torchrl_moe.modules.backends.transformers import answer as sampling
from torchrl_moe.modules.backends.transformers.answer import Sampling, read_sampling


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
    assert [read_sampling(one).leaves_words_out for one in ({}, {"top_k": 5}, {"temperature": 0, "top_k": 5})] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty.* must be "),
        ({"frequency_penalty": -3}, "frequency_penalty.* must be "),
        ({"bad_words": ["a"]}, "does not serve bad_words=.*; vLLM does"),
        ({"logit_bias": {1: 2.0}}, "does not serve logit_bias"),
        ({"structured_outputs": {"regex": "a"}}, "does not serve structured_outputs"),
        ({"nonsense": 1}, "unknown nonsense; known: detokenize, frequency_penalty"),
        ({"logprobs": 5}, "logprobs=5: a completion has the log-probs of its sampled tokens only"),
        ({"temperature": -0.5}, "temperature.* must be "),
        ({"temperature": float("nan")}, "temperature.* must be "),
        ({"temperature": "hot"}, "sampling_params: "),
        ({"top_p": 0}, "top_p.* must be "),
        ({"top_k": 1.5}, "top_k.* must be "),
        ({"min_p": 1.5}, "min_p.* must be "),
        ({"repetition_penalty": 0}, "repetition_penalty.* must be "),
        ({"max_tokens": 0}, "max_tokens.* must be "),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 is more than max_tokens=4"),
        ({"n": 0}, "n.* must be "),
        ({"n": 2, "temperature": 0}, "n=2 with temperature=0 would give one answer several times"),
        ({"stop": [""]}, "stop.* must be "),
        ({"stop": [7]}, "stop.* must be "),
        ({"stop": b"x"}, "stop.* must be "),
        ({"stop_token_ids": [-1]}, "stop_token_ids.* must be "),
        ({"max_tokens": 2.5}, "max_tokens.* must be "),
        ({"min_tokens": 0.5}, "min_tokens.* must be "),
        ({"n": 2.0}, "n.* must be "),
        ({"seed": 2**64}, "seed.* must be "),
        ({"seed": 0.5}, "seed.* must be "),
        ({"ignore_eos": []}, "ignore_eos.* must be "),
        ({"stop": "a", "detokenize": False}, "stop strings need detokenize=True"),
        ("greedy", "must be a mapping, got str"),
    ],
)
def test_what_is_invalid_or_not_served_is_refused(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_sampling(spec)


def test_structured_outputs_are_refused() -> None:
    with pytest.raises(ValueError, match="guided_options_request: engine='transformers' has no structured outputs"):
        read_sampling({}, {"regex": "a"})
