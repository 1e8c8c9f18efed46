"""A group keeps its answers until it is ready, and its rows say which group they are of; metrics by hand."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from support.completions import cut
from support.waiting import in_thread, until
from torchrl_moe.collectors import rollouts
from torchrl_moe.collectors.async_collector import snapshots
from torchrl_moe.collectors.prompt_stream import Prompt
from torchrl_moe.collectors.rollouts import CollectionStats, Group
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.testing import FakeAsyncVLLM


def turn_of(*full: int) -> TensorDictBase:
    """A turn, by the versions of its tokens; -1 is of the prompt."""
    made = [version for version in full if version >= 0]
    row = TensorDict(
        policy_versions=TensorDict(full=torch.tensor(full)),
        tokens=TensorDict(response=torch.zeros(len(made))),
        policy_version=torch.tensor(min(made, default=-1)),
    )
    return lazy_stack([row])


def completed(*turns: TensorDictBase, only_last: bool = False) -> tuple[Group, TensorDictBase]:
    """A group, begun at version 9, of the turns of its sample; and its rows."""
    one = Group(7, Prompt(0, TensorDict()), begun_version=9)
    one.complete([list(turns)], only_last=only_last)
    assert one.rows is not None
    return one, one.rows


def test_the_age_counts_turns_that_are_not_kept() -> None:
    one, rows = completed(turn_of(3, 3), turn_of(5), only_last=True)
    assert (rows["policy_version"].tolist(), one.oldest, one.tokens) == ([5], 3, 3)


def test_a_group_without_a_token_is_as_old_as_its_beginning() -> None:
    assert completed(turn_of(-1))[0].oldest == 9


def test_a_restored_group_is_as_old_as_it_was_and_apart_from_the_trainers_rows() -> None:
    one, rows = completed(turn_of(3, 3))
    state = one.state_dict(version=5)
    rows[0].set("advantage", torch.ones(1))
    again = Group.from_state(8, state, version=20)
    assert again.rows is not None
    assert "advantage" not in again.rows[0].keys()  # noqa: SIM118
    assert (again.number, again.oldest, again.tokens) == (8, 18, 2)
    assert again.rows["group_id"].tolist() == [7] and again.ready_at > 0


def counted(oldest: int, tokens: int, *segments: int, ready_at: float = 0.0) -> Group:
    rows = lazy_stack([TensorDict(num_segments=torch.tensor(count)) for count in segments])
    return Group(0, Prompt(0, TensorDict()), 0, rows=rows, oldest=oldest, tokens=tokens, ready_at=ready_at)


def test_the_metrics_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = CollectionStats()
    groups = [counted(5, 10, 1, 1, ready_at=7.0), counted(3, 30, 1, 4, ready_at=9.0)]
    for one in (*groups, counted(5, 80, 1)):
        stats.completed(one)
    monkeypatch.setattr(rollouts.time, "monotonic", lambda: 10.0)
    stats.gave_out(groups, version=6)
    expected = {
        "inference/staleness_mean": 2.0,  # 1 and 3
        "inference/staleness_max": 3.0,
        "inference/queue_age": 2.0,  # 3 and 1
        "collector/partial_ratio": 0.25,
        "collector/max_segments": 4.0,
        "collector/length_trained_over_sampled": 0.5,  # 20 a group over 40
    }
    found = stats.scalars()
    assert {name: found[name] for name in expected} == expected


def test_a_replica_that_is_ahead_makes_no_negative_age() -> None:
    stats = CollectionStats()
    stats.gave_out([counted(7, 1, 1)], version=6)
    assert stats.scalars()["inference/staleness_max"] == 0.0


def test_an_engine_is_idle_while_nothing_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stats = CollectionStats()
    for seconds, change in ((2, 2), (5, -1), (1, -1), (2, 0)):  # idle at first and at last
        now[0] += seconds
        stats.in_flight += change
    found = stats.scalars()
    assert (found["inference/idle"], found["inference/in_flight"]) == (pytest.approx(0.4), 0.0)


# -- answers ----------------------------------------------------------------------------------------------------------
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


def running(restored: Any = None) -> Group:
    return Group(0, Prompt(7, TensorDict()), 0, restored or {})


def asked(group: Group, sample: int, ids: list[int], version: int = 0, **more: Any) -> dict[str, Any]:
    return group.ask(sample, f"name-7-{sample}", {**arguments(ids), **more}, version)[1]


def test_what_is_asked_again_continues(engine: FakeAsyncVLLM) -> None:
    first = answer(engine, asked(running(), 0, IDS))
    state = {0: {0: (first, how()), 1: (half(first), how())}}
    again = running(state)
    assert again.answers({}) == state  # a second crash loses nothing
    turn = asked(again, 0, IDS)
    assert turn["resume"] is first
    assert "prompt_token_ids" not in turn
    assert asked(again, 0, IDS)["resume"].outputs[0].token_ids.tolist() == first.outputs[0].token_ids[:2].tolist()
    assert "resume" not in asked(again, 0, IDS)  # a third turn there was none
    assert again.answers({}) == state


@pytest.mark.parametrize(
    ("ids", "version", "asked_how", "is_used"),
    [([65, 66], 3, {}, False), (IDS, 2, {}, False), (IDS, 3, {"max_tokens": 5}, False), (IDS, 3, {}, True)],
)
def test_an_answer_to_another_prompt_or_of_another_kind_or_from_the_future_is_not_used(
    engine: FakeAsyncVLLM, ids: list[int], version: int, asked_how: dict[str, int], is_used: bool
) -> None:
    had = answer(engine, asked(running(), 0, IDS))
    had.outputs[0] = replace(had.outputs[0], policy_versions=had.outputs[0].policy_versions + 3)
    turn = asked(running({0: {0: (had, how(**asked_how))}}), 0, ids, version)
    assert ("resume" in turn, "prompt_token_ids" in turn) == (is_used, not is_used)


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
