"""Groups keep their answers until they are ready; metrics by hand; prompts come one by one, also after a restore."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.utils.data import DataLoader
from torchrl.envs.llm.transforms import DataLoadingPrimer

from support.collecting import Questions
from support.completions import cut
from support.waiting import in_thread, until
from torchrl_moe.collectors.async_collector import snapshots
from torchrl_moe.collectors.llm_collector import PromptFeed
from torchrl_moe.collectors.prompt_stream import Prompt, PromptStream
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


@pytest.mark.parametrize(
    ("turns", "oldest", "tokens"), [([(3, 3), (5,)], 3, 3), ([(-1,)], 9, 0)], ids=["turns that are not kept", "none"]
)
def test_the_age_counts_all_tokens_or_the_beginning(turns: list[tuple[int, ...]], oldest: int, tokens: int) -> None:
    """Of a group that was begun at version 9, of which the last turn is kept; and so after a restore."""
    one = Group(7, Prompt(0, TensorDict()), begun_version=9)
    one.complete([[turn_of(*turn) for turn in turns]], only_last=True)
    assert one.rows is not None and one.rows["policy_version"].tolist() == [turns[-1][0]]
    assert (one.oldest, one.tokens) == (oldest, tokens)
    state = one.state_dict(version=11)
    one.rows[0].set("advantage", torch.ones(1))
    again = Group.from_state(8, state, version=20)
    assert again.rows is not None and "advantage" not in again.rows[0].keys()  # noqa: SIM118  the trainer's rows
    assert (again.number, 20 - again.oldest, again.tokens) == (8, 11 - oldest, tokens)
    assert again.rows["group_id"].tolist() == [7] and again.ready_at > 0


def counted(oldest: int, tokens: int, *segments: int, ready_at: float = 0.0) -> Group:
    rows = lazy_stack([TensorDict(num_segments=torch.tensor(count)) for count in segments])
    return Group(0, Prompt(0, TensorDict()), 0, rows=rows, oldest=oldest, tokens=tokens, ready_at=ready_at)


def test_the_metrics_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is idle at first and at last, while nothing is in flight."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stats = CollectionStats()
    for seconds, change in ((2, 2), (5, -1), (1, -1), (2, 0)):
        now[0] += seconds
        stats.in_flight += change
    groups = [counted(5, 10, 1, 1, ready_at=7.0), counted(3, 30, 1, 4, ready_at=9.0)]
    for one in (*groups, counted(5, 80, 1)):
        stats.completed(one)
    stats.gave_out(groups, version=6)
    expected = {
        "inference/staleness_mean": 2.0,  # 1 and 3
        "inference/staleness_max": 3.0,
        "inference/queue_age": 2.0,  # 3 and 1
        "inference/idle": pytest.approx(0.4),
        "inference/in_flight": 0.0,
        "collector/partial_ratio": 0.25,
        "collector/max_segments": 4.0,
        "collector/length_trained_over_sampled": 0.5,  # 20 a group over 40
    }
    found = stats.scalars()
    assert {name: found[name] for name in expected} == expected
    stats.gave_out([counted(7, 1, 1)], version=6)  # a replica that is ahead
    assert stats.scalars()["inference/staleness_max"] == 0.0


# -- answers ----------------------------------------------------------------------------------------------------------
IDS = [65, 66, 67]


def answer(engine: FakeAsyncVLLM, asked: dict[str, Any]) -> Completion:
    completion = engine.generate(
        asked["prompt_token_ids"], asked["sampling_params"], request_ids=asked["request_id"], use_tqdm=False
    )
    assert isinstance(completion, Completion)
    return completion


def how(**kwargs: Any) -> str:
    return f"{ {'max_tokens': 4, 'logprobs': 0, **kwargs}!r}, routes: True"


def running(restored: Any = None) -> Group:
    return Group(0, Prompt(7, TensorDict()), 0, restored or {})


def asked(group: Group, sample: int, ids: list[int], version: int = 0) -> dict[str, Any]:
    arguments = {"prompt_token_ids": ids, "sampling_params": {"max_tokens": 4, "logprobs": 0}}
    return group.ask(sample, f"name-7-{sample}", arguments, version)[1]


def test_what_is_asked_again_continues(engine: FakeAsyncVLLM) -> None:
    first = answer(engine, asked(running(), 0, IDS))
    state = {0: {0: (first, how()), 1: (cut(first, 2, decode=str), how())}}
    again = running(state)
    assert again.answers({}) == state  # a second crash loses nothing
    turn = asked(again, 0, IDS)
    assert turn["resume"] is first
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
    until(lambda: set(snapshots(engine)) == set(names))
    engine.replicas[0].die()  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        until(lambda: len(snapshots(engine)) == 2)  # the others wait until they can be alone at the other one
    engine.abort(names)
    assert len(calls.result(60)) == 4


# -- prompts ---------------------------------------------------------------------------------------------------------
def read(stream: PromptStream, count: int) -> list[str]:
    return [prompt.data["query"] for prompt in islice(stream, count)]


def shuffled(seed: int | None = None) -> DataLoader[Any]:
    rows = [{"query": f"q{i}"} for i in range(10)]
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    collate = lambda batch: {"query": [row["query"] for row in batch]}  # noqa: E731
    return DataLoader(rows, batch_size=3, shuffle=True, generator=generator, collate_fn=collate)


@pytest.mark.parametrize(
    "dataloader",
    [
        [{"query": ["a", "b"]}, {"query": ["c"]}],
        [{"query": "a"}, {"query": "b"}, {"query": "c"}],
        [[{"query": "a"}, {"query": "b"}], [{"query": "c"}]],
        [TensorDict(query=["a", "b", "c"], batch_size=[3])],
        [lazy_stack([TensorDict(query="a"), TensorDict(query="b")]), TensorDict(query="c")],
        [{"query": ["a", "b", "c"], "target": torch.arange(3), "source": ["x", "y", "z"]}],
    ],
)
def test_rows_of_batches_of_every_kind(dataloader: Iterable[Any]) -> None:
    stream = PromptStream(dataloader)
    prompts = list(islice(stream, 5))
    assert [prompt.data["query"] for prompt in prompts] == ["a", "b", "c", "a", "b"]
    assert [int(prompt.data.get("target", prompt.position % 3)) for prompt in prompts] == [0, 1, 2, 0, 1]
    assert [prompt.position for prompt in prompts] == [0, 1, 2, 3, 4]
    assert all(prompt.data.batch_size == () for prompt in prompts)
    again = PromptStream(dataloader)
    again.load_state_dict(stream.state_dict(prompts[3:]))
    assert (read(again, 3), again.position) == (["a", "b", "c"], 6)


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("before", [0, 1, 7, 10, 14])
def test_a_restored_stream_continues(seed: int | None, before: int) -> None:
    torch.manual_seed(0)
    first, second = PromptStream(shuffled(seed)), PromptStream(shuffled(seed))
    read(first, before)
    state = first.state_dict()
    expected = read(first, 6) if seed is not None or before % 10 else []
    torch.manual_seed(1)
    second.load_state_dict(state)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(after, torch.get_rng_state())  # the global generator is not ours
    got = read(second, 6)
    left = len(expected) if seed is not None else (10 - before % 10 if before % 10 else 0)  # of this epoch
    assert (got[:left], len(got)) == (expected[:left], 6)


def test_data_that_can_be_read_once_are_not_read_again_by_what_saw_their_end() -> None:
    def once() -> PromptStream:
        return PromptStream(iter([{"query": "a"}, {"query": "b"}]))

    stream, again = once(), once()
    assert read(stream, 2) == ["a", "b"]
    for _ in range(2):
        with pytest.raises(ValueError, match="the dataloader yields nothing"):
            next(stream)
        again.load_state_dict(stream.state_dict())
        stream, again = again, once()


@pytest.mark.parametrize(
    ("rows", "under_way", "expected"),
    [("abcd", [2, 0], [(0, "a"), (2, "c"), (3, "d")]), ("ab", [0], [(0, "a"), (3, "b")])],
)
def test_what_was_under_way_comes_again_first_also_of_an_earlier_epoch(
    rows: str, under_way: list[int], expected: list[tuple[int, str]]
) -> None:
    first, second = PromptStream([{"query": list(rows)}]), PromptStream([{"query": list(rows)}])
    prompts = list(islice(first, 3))
    second.load_state_dict(first.state_dict([prompts[i] for i in under_way]))
    assert [(prompt.position, prompt.data["query"]) for prompt in islice(second, len(expected))] == expected


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        ([], ValueError, "yields nothing"),
        (["a"], TypeError, "must yield mappings or TensorDicts, got str: give it a collate_fn"),
        ([{"query": ["a", "b"], "target": ["x"]}], ValueError, r"different lengths: \[1, 2\]"),
        ([{"query": "Which?", "choices": ["a", "b"]}], ValueError, "'query' is of one row: make it a list, too"),
        ([{"choices": ["a", "b"], "hint": None}], ValueError, "'hint' is of one row"),
        ([{"messages": [{"role": "user", "content": "?"}] * 2}], ValueError, "'messages' is of one row: .* in lists"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        next(PromptStream(data))


def test_a_feed_gives_each_sample_that_is_reset_the_next_row_as_a_copy_so_many_times() -> None:
    primer = DataLoadingPrimer(dataloader=Questions(64, 3), batch_size=[4], repeats=2)
    feed = PromptFeed(primer)

    def draw(*samples: int) -> list[Any]:
        reset = torch.zeros(4, 1, dtype=torch.bool)
        reset[list(samples)] = True
        return list(primer.default_value(reset=reset).unbind(0))

    first = draw(0, 1, 2)
    assert [row["query"] for row in (*first, *draw(3))] == ["q0", "q0", "q1", "q1"]
    first[0]["query"] = "changed"
    assert [position for position, _ in feed.state_dict()["copies"]] == [0, 0, 1, 1]
    assert feed.state_dict()["copies"][0][1]["query"] == "q0"
    assert (feed()["query"], feed(torch.tensor(True))["query"]) == ("q2", "q2")  # of one sample
