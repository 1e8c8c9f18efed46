"""What an adapter is: one method, and what it has besides is found by name."""

from __future__ import annotations

from typing import Any

import pytest

from support.conforming_engine import ConformingEngine
from torchrl_moe.testing.conformance import Answer, EngineAdapter, Sampling, ServiceAdapter
from torchrl_moe.testing.conformance.adapter import Aborts, ReportsVersion, Resumes, UpdatesWeights

ALL = (EngineAdapter, Aborts, Resumes, UpdatesWeights, ReportsVersion)


class Bare:
    def generate(self, prompts: Any, sampling: Sampling, request_ids: Any = None) -> list[list[Answer]]:
        return [[Answer(token_ids=[1])] for _ in prompts]


@pytest.mark.parametrize("kind", [ConformingEngine, ServiceAdapter])
def test_our_adapters_have_every_method(kind: type) -> None:
    assert [issubclass(kind, protocol) for protocol in ALL] == [True] * 5


def test_one_method_makes_an_adapter() -> None:
    assert [isinstance(Bare(), protocol) for protocol in ALL] == [True, False, False, False, False]


def test_a_sampling_names_what_changes_the_distribution() -> None:
    assert Sampling(max_tokens=3, n=4).changes == {}
    given = Sampling(temperature=0.5, top_k=7, presence_penalty=0.1)
    assert given.changes == {"temperature": 0.5, "top_k": 7, "presence_penalty": 0.1}


def test_an_answer_says_nothing_that_it_was_not_given() -> None:
    bare = Answer(token_ids=[1, 2])
    assert (bare.log_probs, bare.routed_experts, bare.versions, bare.num_cached_tokens) == (None, None, None, None)
    assert bare.finish_reason == "length"
