"""Who joins the batch next, and who must wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.processes import ids_request
from torchrl_moe.modules.backends.replica import Scoring
from torchrl_moe.modules.backends.transformers.decoder import Running, WaitingLine
from torchrl_moe.modules.backends.transformers.loading import Loaded

TOKEN_BYTES = 10


class Line:
    """A waiting line, and who of it may run."""

    def __init__(self, plain: Loaded, **arguments: Any) -> None:
        self.reader = plain.reader
        self.held: set[str] = set()
        self.line = WaitingLine(
            replace(plain.arguments, **arguments),
            TOKEN_BYTES,
            lambda running: running.request.request_id not in self.held,
        )

    def add(self, name: str, tokens: int = 2, priority: int = 0, **fields: Any) -> Running:
        params = {"max_tokens": 4, **fields.pop("params", {})}
        ids = list(range(1, tokens + 1))
        running = self.reader(ids_request(name, ids, sampling_params=params, priority=priority, **fields))
        self.line.add(running)
        return running

    def join(self, inside: Any = (), again: Any = ()) -> list[Any]:
        return self.line.joining(inside, again)


@pytest.fixture
def waiting(plain: Loaded) -> Any:
    return lambda **arguments: Line(plain, **arguments)


def test_first_come_first_served(waiting: Any) -> None:
    line = waiting()
    a, b = line.add("a", priority=1), line.add("b", params={"n": 2})
    assert len(line.line) == 3
    assert line.join() == [*a.answers, *b.answers]
    assert a.joined_at > 0
    assert line.join() == []


def test_the_lower_the_earlier_if_the_engine_goes_by_priority(waiting: Any) -> None:
    line = waiting(scheduling_policy="priority")
    a, b, c = line.add("a", priority=1), line.add("b"), line.add("c", priority=1)
    assert line.join() == [*b.answers, *a.answers, *c.answers]


def test_there_are_at_most_so_many_answers(waiting: Any) -> None:
    line = waiting(max_num_seqs=3)
    a, b = line.add("a", params={"n": 2}), line.add("b", params={"n": 2})
    assert line.join() == [*a.answers, b.answers[0]]
    assert line.join(inside=a.answers) == [b.answers[1]]
    c = line.add("c")
    assert line.join(inside=a.answers[:1], again=b.answers) == b.answers  # what is read again comes first
    assert line.join(inside=b.answers) == c.answers


def test_a_step_reads_so_many_tokens_or_one_long_prompt(waiting: Any) -> None:
    line = waiting(max_num_batched_tokens=10)
    a, b, c, d = (line.add(name, tokens) for name, tokens in zip("abcd", (6, 4, 1, 30), strict=True))
    assert line.join() == a.answers  # 2 x 6 > 10: what is shorter is padded
    assert line.join() == [*b.answers, *c.answers]
    assert line.join() == d.answers


def test_what_is_read_again_keeps_to_a_steps_tokens_too(waiting: Any) -> None:
    line = waiting(max_num_batched_tokens=4)
    a = line.add("a", params={"n": 3})
    first, second, third = a.answers
    line.line.drop(a)
    b = line.add("b")
    assert line.join(again=[first, second, third]) == [first, second]
    assert line.join(inside=[first, second], again=[third]) == [third, *b.answers]


def test_keys_and_values_of_all_must_fit_at_their_longest(waiting: Any) -> None:
    line = waiting(kv_cache_memory_bytes=3 * 8 * TOKEN_BYTES)
    a, b, c, d = (line.add(name, 4) for name in "abcd")
    assert line.join() == [*a.answers, *b.answers, *c.answers]
    assert line.join(inside=b.answers + c.answers) == d.answers
    wide = line.add("wide", 9)  # all would be as wide: 2 x 13 > 24
    assert line.join(inside=d.answers) == []
    assert line.join() == wide.answers


def test_those_that_may_not_run_are_passed_by(waiting: Any) -> None:
    line = waiting()
    a, b = line.add("a"), line.add("b")
    scored = line.add("s", scoring=Scoring())
    line.held = {"a", "s"}
    assert line.join() == b.answers
    assert line.line.next_scored() is None
    line.held = set()
    assert line.join() == a.answers
    assert line.line.next_scored() is scored
    assert line.line.next_scored() is None


def test_prompts_to_score_wait_apart_and_what_is_dropped_is_gone(waiting: Any) -> None:
    line = waiting(scheduling_policy="priority")
    late, first = line.add("s", scoring=Scoring(), priority=2), line.add("t", scoring=Scoring())
    a = line.add("a", params={"n": 2})
    assert line.join() == a.answers
    assert line.line.next_scored() is first
    line.line.drop(late)
    b, c = line.add("b"), line.add("c")
    line.line.drop(b)
    assert len(line.line) == 1
    assert line.join() == c.answers
    assert line.line.next_scored() is None
