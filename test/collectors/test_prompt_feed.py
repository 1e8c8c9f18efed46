"""Each sample's prompt is open until it is yielded; what is open comes again."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.envs.llm.transforms import DataLoadingPrimer

from support.collecting import Questions
from torchrl_moe.collectors.prompt_stream import PromptFeed


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
    assert draw(feed, 0, 1, 2) == ["q0", "q0", "q1"]
    assert draw(feed, 3) == ["q1"]
    assert feed()["query"] == "q2"  # an environment that is no batch
    assert feed(torch.tensor(True))["query"] == "q2"


def test_what_is_not_yielded_is_in_its_state_and_comes_first() -> None:
    feed = feed_of(repeats=2)
    draw(feed, 0, 1, 2)
    assert copies(feed) == [0, 0, 1, 1]  # three are under way, one is to be drawn
    done = feed.finished(1)
    draw(feed, 1)
    assert copies(feed) == [0, 1, 1]
    assert copies(feed, [done]) == [0, 0, 1, 1]
    other = feed_of(repeats=2)
    draw(other, 0)
    other.load_state_dict(feed.state_dict([done]))
    assert draw(other, 0, 1, 2, 3) == ["q0", "q0", "q1", "q1"]
    assert draw(other, 0) == ["q2"]


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
    assert draw(feed, 0) == ["q0"]
    assert feed.stream.position == 1

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
