"""Workloads of rollouts. A workload yields endless jobs from a seed; lengths are in tokens, pauses in seconds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.balancing.fleet import Job, Segment

__all__ = ["WORKLOADS", "Shape"]

Turn = tuple[tuple[Segment, ...], Segment, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Parameters of a workload; held-out runs change them."""

    template: int = 1000
    question: tuple[int, int] = (100, 400)
    answer: float = 300.0  # median
    spread: float = 0.5  # of the logarithm
    group: int = 8
    turns: tuple[int, int] = (8, 16)
    observation: tuple[int, int] = (100, 500)
    pause: float = 2.0
    document: int = 4000
    hot: float = 0.3

    def answer_tokens(self, rng: random.Random, spread: float | None = None) -> int:
        """Draw a length, log-normal, cut at 8192."""
        return max(
            1, min(8192, round(self.answer * rng.lognormvariate(0.0, self.spread if spread is None else spread)))
        )


def _single(session: str, prompt: tuple[Segment, ...], answer: Segment) -> Job:
    return Job(session, iter([(prompt, answer, 0.0)]))


def groups(shape: Shape, rng: random.Random, names: Iterator[int]) -> Iterator[Job]:
    """GRPO: groups of one prompt, after a template that all groups share."""
    template = (next(names), shape.template)
    while True:
        question = (next(names), rng.randint(*shape.question))
        for _ in range(shape.group):
            answer = (next(names), shape.answer_tokens(rng))
            yield _single(f"{answer[0]}", (template, question), answer)


def agents(shape: Shape, rng: random.Random, names: Iterator[int]) -> Iterator[Job]:
    """Rollouts of many turns, in groups that share a task; each turn's prompt continues from the last."""
    template = (next(names), shape.template)

    def turns(task: Segment) -> Iterator[Turn]:
        prompt: tuple[Segment, ...] = (template, task)
        for turn in range(rng.randint(*shape.turns)):
            answer = (next(names), shape.answer_tokens(rng))
            yield prompt, answer, rng.expovariate(1 / shape.pause) if turn else 0.0
            prompt = (*prompt, answer, (next(names), rng.randint(*shape.observation)))

    while True:
        task = (next(names), rng.randint(*shape.question))
        for _ in range(shape.group):
            # drawn in advance: the jobs must not depend on how fast a fleet answers
            yield Job(f"{next(names)}", iter(list(turns(task))))


def long_tail(shape: Shape, rng: random.Random, names: Iterator[int]) -> Iterator[Job]:
    """Distinct prompts after the template, and answers of which a few are very long."""
    template = (next(names), shape.template)
    while True:
        answer = (next(names), shape.answer_tokens(rng, 1.2))
        yield _single(f"{answer[0]}", (template, (next(names), rng.randint(*shape.question))), answer)


def hot_prefix(shape: Shape, rng: random.Random, names: Iterator[int]) -> Iterator[Job]:
    """Questions about documents: one document gets a large share of them, the others a few each."""
    hot = (next(names), shape.document)
    cold = [(next(names), shape.document) for _ in range(64)]
    while True:
        document = hot if rng.random() < shape.hot else rng.choice(cold)
        answer = (next(names), shape.answer_tokens(rng))
        yield _single(f"{answer[0]}", (document, (next(names), rng.randint(*shape.question))), answer)


def mixed(shape: Shape, rng: random.Random, names: Iterator[int]) -> Iterator[Job]:
    """Groups, agents, and single prompts with a long tail."""
    kinds = [make(shape, rng, names) for make in (groups, agents, long_tail)]
    while True:
        count = rng.choice((1, shape.group))
        yield from itertools.islice(rng.choice(kinds), count)


WORKLOADS: Mapping[str, Callable[[Shape, random.Random, Iterator[int]], Iterator[Job]]] = {
    "groups": groups,
    "agents": agents,
    "long tail": long_tail,
    "hot prefix": hot_prefix,
    "mixed": mixed,
    "replica loss": agents,
}
