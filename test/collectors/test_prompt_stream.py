"""Rows come one by one, without end; what is not yielded comes again, also after a restore."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.envs.llm.transforms import DataLoadingPrimer

from support.collecting import Questions
from torchrl_moe.collectors.llm_collector import PromptFeed
from torchrl_moe.collectors.prompt_stream import PromptStream


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
    assert [prompt.position for prompt in prompts] == [0, 1, 2, 3, 4]
    assert all(prompt.data.batch_size == () for prompt in prompts)
    assert stream.position == 5


def test_columns_stay_together() -> None:
    (row,) = islice(PromptStream([{"query": ["a", "b"], "target": torch.tensor([[1, 2], [3, 4]])}]), 1, 2)
    assert (row.data["query"], row.data["target"].tolist()) == ("b", [3, 4])


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


def test_rows_can_be_given_back() -> None:
    stream = PromptStream([{"query": ["a", "b", "c"]}])
    one, other = next(stream), next(stream)
    stream.give_back([other])
    stream.give_back([one])
    assert read(stream, 3) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        ([], ValueError, "yields nothing"),
        (["a"], TypeError, "must yield mappings or TensorDicts, got str: give it a collate_fn"),
        ([{"query": ["a", "b"], "target": ["x"]}], ValueError, r"different lengths: \[1, 2\]"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        next(PromptStream(data))


def primer_of(data: Any = None, **kwargs: Any) -> DataLoadingPrimer:
    return DataLoadingPrimer(dataloader=Questions(64, 3) if data is None else data, batch_size=[4], **kwargs)


def feed_of(repeats: int | None = None) -> PromptFeed:
    return PromptFeed(primer_of(repeats=repeats))


def draw(feed: PromptFeed, *samples: int) -> list[str]:
    """Reset some of four samples."""
    reset = torch.zeros(4, 1, dtype=torch.bool)
    reset[list(samples)] = True
    return [row["query"] for row in feed(reset).unbind(0)]


def copies(feed: PromptFeed, *args: Any) -> list[int]:
    return [position for position, _ in feed.state_dict(*args)["copies"]]


def test_each_sample_that_is_reset_gets_the_next_row_so_many_times() -> None:
    feed = feed_of(repeats=2)
    assert (draw(feed, 0, 1, 2), draw(feed, 3), feed()["query"]) == (["q0", "q0", "q1"], ["q1"], "q2")
    assert feed(torch.tensor(True))["query"] == "q2"


def test_what_is_not_yielded_is_in_its_state_and_comes_first() -> None:
    feed = feed_of(repeats=2)
    draw(feed, 0, 1, 2)
    assert copies(feed) == [0, 0, 1, 1]  # three are under way, one is to be drawn
    done = feed.finished(1)
    draw(feed, 1)
    assert (copies(feed), copies(feed, [done])) == ([0, 1, 1], [0, 0, 1, 1])
    other = feed_of(repeats=2)
    draw(other, 0)
    other.load_state_dict(feed.state_dict([done]))
    assert (draw(other, 0, 1, 2, 3), draw(other, 0)) == (["q0", "q0", "q1", "q1"], ["q2"])


def test_samples_that_were_yielded_are_forgotten_but_for_the_one_under_way() -> None:
    feed = feed_of()
    draw(feed, 0, 1)
    draw(feed, 0)
    feed.forget_finished()
    assert copies(feed) == [1, 2]
    feed.give_back()
    assert draw(feed, 0, 1, 2) == ["q1", "q2", "q3"]


def test_data_begins_at_its_start_unless_it_can_be_read_once_only() -> None:
    feed = feed_of()
    draw(feed, 0, 1)
    feed.restart()
    assert (draw(feed, 0), feed.stream.position) == (["q0"], 1)

    once = PromptFeed(primer_of(iter(Questions(64, 3))))
    draw(once, 0, 1)
    once.restart()
    assert draw(once, 0, 1, 2) == ["q0", "q1", "q2"]


def test_rows_are_given_as_copies() -> None:
    feed = feed_of(repeats=2)
    first = feed(torch.tensor([True, False, False, False]))[0]
    first["query"] = "changed"
    assert draw(feed, 1) == ["q0"]


def test_the_primer_draws_from_it() -> None:
    primer = primer_of()
    feed = PromptFeed(primer)
    assert primer.default_value(reset=torch.tensor([True, True, False, False]))["query"] == ["q0", "q1"]
    assert feed.stream.position == 2
