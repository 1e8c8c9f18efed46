"""Answers are kept while their group is under way, and used again only if what is asked is the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from support.completions import cut
from support.waiting import in_thread, until
from torchrl_moe.collectors.workflow import Answers, snapshots
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.testing import FakeAsyncVLLM

IDS = [65, 66, 67]


def arguments(ids: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "sampling_params": {"max_tokens": 4, "logprobs": 0}}


def answer(engine: FakeAsyncVLLM, asked: dict[str, Any]) -> Completion:
    completion = engine.generate(
        asked["prompt_token_ids"], asked["sampling_params"], request_ids=asked["request_id"], use_tqdm=False
    )
    assert isinstance(completion, Completion)
    return completion


def how(**kwargs: Any) -> str:
    return f"{ {'max_tokens': 4, 'logprobs': 0, **kwargs}!r}, routes: True"


def half(completion: Completion) -> Completion:
    return cut(completion, 2, decode=str)


def test_each_turn_has_a_name_of_its_own_and_all_of_a_sample_one_session() -> None:
    answers = Answers()
    asked = [answers.ask(position, sample, arguments(IDS), 0) for position, sample in ((7, 0), (7, 0), (7, 1), (8, 0))]
    assert len({one["request_id"] for one in asked}) == 4
    assert [one["session_id"] == asked[0]["session_id"] for one in asked] == [True, True, False, False]
    mine = answers.ask(9, 0, {**arguments(IDS), "session_id": "mine"}, 0)
    assert mine["session_id"] == "mine"
    assert answers.ask(7, 0, arguments(IDS), 0)["request_id"] != Answers().ask(7, 0, arguments(IDS), 0)["request_id"]


def test_whole_and_cut_answers_are_in_the_state_until_their_group_is_over(engine: FakeAsyncVLLM) -> None:
    answers = Answers()
    first = answer(engine, answers.ask(7, 1, arguments(IDS), 0))
    answers.add(7, 1, first)
    second = answers.ask(7, 1, arguments([*IDS, 68]), 0)
    some = half(answer(engine, second))
    assert answers.state_dict({}) == {7: {1: {0: (first, how())}}}
    assert answers.state_dict({second["request_id"]: some, "another's": first}) == {
        7: {1: {0: (first, how()), 1: (some, how())}}
    }
    answers.forget(7)
    assert answers.state_dict({second["request_id"]: some}) == {}


def test_what_is_asked_again_continues(engine: FakeAsyncVLLM) -> None:
    answers = Answers()
    first = answer(engine, answers.ask(7, 0, arguments(IDS), 0))
    state = {7: {0: {0: (first, how()), 1: (half(first), how())}}, 9: {0: {0: (first, how())}}}
    again = Answers()
    again.load_state_dict(state)
    assert again.state_dict({}) == state  # a second crash loses nothing
    asked = again.ask(7, 0, arguments(IDS), 0)
    assert asked["resume"] is first
    assert "prompt_token_ids" not in asked
    assert (
        again.ask(7, 0, arguments(IDS), 0)["resume"].outputs[0].token_ids.tolist()
        == first.outputs[0].token_ids[:2].tolist()
    )
    assert "resume" not in again.ask(7, 0, arguments(IDS), 0)  # a third turn there was none
    again.forget(7)
    assert again.state_dict({}) == {9: {0: {0: (first, how())}}}


@pytest.mark.parametrize(
    ("ids", "version", "asked_how", "is_used"),
    [([65, 66], 3, {}, False), (IDS, 2, {}, False), (IDS, 3, {"max_tokens": 5}, False), (IDS, 3, {}, True)],
)
def test_an_answer_to_another_prompt_or_of_another_kind_or_from_the_future_is_not_used(
    engine: FakeAsyncVLLM, ids: list[int], version: int, asked_how: dict[str, int], is_used: bool
) -> None:
    had = answer(engine, Answers().ask(0, 0, arguments(IDS), 0))
    had.outputs[0] = replace(had.outputs[0], policy_versions=had.outputs[0].policy_versions + 3)
    answers = Answers()
    answers.load_state_dict({0: {0: {0: (had, how(**asked_how))}}})
    asked = answers.ask(0, 0, arguments(ids), version)
    assert ("resume" in asked, "prompt_token_ids" in asked) == (is_used, not is_used)


def test_snapshots_are_of_all_replicas_that_answer(engine: FakeAsyncVLLM, caplog: pytest.LogCaptureFixture) -> None:
    for replica in engine.replicas:
        replica.token_seconds = 3600.0  # type: ignore[attr-defined]
    names = [f"request {i}" for i in range(4)]
    calls = in_thread(lambda: engine.generate([IDS] * 4, {"max_tokens": 2}, request_ids=names, use_tqdm=False))
    until(lambda: len(snapshots(engine)) == 4)
    assert set(snapshots(engine)) == set(names)
    engine.replicas[0].die()  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        until(lambda: len(snapshots(engine)) == 2)  # the others wait until they can be alone at the other one
    engine.abort(names)
    assert len(calls.result(60)) == 4
