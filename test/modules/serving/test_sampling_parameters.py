"""Sampling parameters read as a mapping and as vLLM's object, and do not change."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest

from torchrl_moe.modules.serving.requests import SamplingParameters

GIVEN = {"max_tokens": 8, "temperature": 0.7}


def test_it_is_the_mapping_that_was_given() -> None:
    params = SamplingParameters(GIVEN)
    assert params == GIVEN
    assert {**params, "n": 2} == {**GIVEN, "n": 2}
    assert (list(params), len(params), params.get("n")) == (["max_tokens", "temperature"], 2, None)
    assert repr(params) == f"SamplingParameters({GIVEN!r})"


def test_attributes_are_what_was_given_and_else_vllms_defaults() -> None:
    params = SamplingParameters(GIVEN)
    assert (params.max_tokens, params.temperature) == (8, 0.7)
    assert (params.n, params.top_p, params.stop) == (1, 1.0, [])
    with pytest.raises(AttributeError, match="best_of"):
        params.best_of  # noqa: B018  vLLM has no such field any more


def test_without_vllm_only_what_was_given_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    params = SamplingParameters(GIVEN)
    assert params.max_tokens == 8
    with pytest.raises(AttributeError, match=r"top_p was not given, and vLLM, .* is not installed"):
        params.top_p  # noqa: B018


def test_it_does_not_change() -> None:
    given = dict(GIVEN)
    params = SamplingParameters(given)
    given["max_tokens"] = 9
    assert params.max_tokens == 8
    with pytest.raises(AttributeError, match=r"\.temperature = 0 would change nothing: pass temperature="):
        params.temperature = 0


def test_it_is_copied_and_pickled() -> None:
    params = SamplingParameters(GIVEN)
    for other in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert type(other) is SamplingParameters
        assert other == params
        assert other.max_tokens == 8
