"""Engines with a fault each, by the check that must see it; and the conforming one that has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from support.conforming_engine import ConformingEngine, Running
from torchrl_moe.testing.conformance import Answer, Sampling

Fault = Callable[[PreTrainedModel], Any]
TOKEN_SECONDS = 0.005


class Faulty(ConformingEngine):
    """Spoils a field of each answer by ``of_answer(prompt, answer)``, or of one that continued.

    The latter by ``of_resumed(engine, prompt, first part, whole)``.
    """

    def __init__(
        self, model: PreTrainedModel, name: str, of_answer: Any = None, of_resumed: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(model, **kwargs)
        self.field, self.of_answer, self.of_resumed = name, of_answer, of_resumed

    def answer(self, running: Running, sampling: Sampling, name: str) -> Answer:
        answer = super().answer(running, sampling, name)
        if self.of_answer is None:
            return answer
        return replace(answer, **{self.field: self.of_answer(running.prompt, answer)})

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        whole = super().resume(prompt, answer, sampling)
        if self.of_resumed is None:
            return whole
        return replace(whole, **{self.field: self.of_resumed(self, prompt, answer, whole)})


def answers(name: str, of_answer: Callable[[Sequence[int], Answer], Any], **kwargs: Any) -> Fault:
    return lambda model: Faulty(model, name, of_answer, **kwargs)


def rows(change: Callable[[Any], Any]) -> Fault:
    """An engine whose routes ``[T - 1, L, K]`` a function has spoilt."""
    return answers("routed_experts", lambda prompt, answer: change(answer.routed_experts))


def rows_of(change: Callable[[Sequence[int], Any, int], Any], **kwargs: Any) -> Fault:
    """The same, by prompt, routes and the number of cached tokens."""
    return answers("routed_experts", lambda p, a: change(p, a.routed_experts, a.num_cached_tokens), **kwargs)


def versions(change: Callable[[Any], Any], **kwargs: Any) -> Fault:
    """An engine whose versions ``[G]`` a function has spoilt."""
    return answers("versions", lambda prompt, answer: change(answer.versions), **kwargs)


def resumed(name: str, of_resumed: Callable[[Any, Sequence[int], Answer, Answer], Any]) -> Fault:
    return lambda model: Faulty(model, name, of_resumed=of_resumed, **SLOW)


def with_values(routes: Any, place: Any, values: Any) -> Any:
    spoilt = routes.copy()
    spoilt[place] = values
    return spoilt


def zeros_for_dense(routes: Any) -> Any:
    return np.where(routes < 0, 0, routes)


def layers_swapped(routes: Any) -> Any:
    return routes[:, [0, 2, 1]]


def chunks_swapped(prompt: Sequence[int], routes: Any, _: int) -> Any:
    middle = len(prompt) // 2
    head, tail, rest = np.split(routes, [middle, 2 * middle])
    return np.concatenate([tail, head, rest])


def stale_cached(_: Sequence[int], routes: Any, cached: int) -> Any:
    """Rows of some other request in the blocks that were cached."""
    return with_values(routes, np.s_[:cached, 1:], np.flip(routes[:cached, 1:], 0))


class Groups(ConformingEngine):
    """Spoils all answers to a prompt together."""

    def __init__(self, model: PreTrainedModel, of_group: Callable[[list[Answer]], list[Answer]]) -> None:
        super().__init__(model)
        self.of_group = of_group

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[list[Answer]]:
        return [self.of_group(group) for group in super().generate(prompts, sampling, request_ids)]


def shared_rows(group: list[Answer]) -> list[Answer]:
    return [replace(one, routed_experts=group[0].routed_experts) for one in group]


class IgnoresAborts(ConformingEngine):
    def abort(self, request_ids: Sequence[str]) -> None:
        """It goes on."""


class BeginsAgain(ConformingEngine):
    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        ((again,),) = self.generate([prompt], sampling)
        return again


class Takes(ConformingEngine):
    """Loads the first part of new weights."""

    def __init__(self, model: PreTrainedModel, share: float) -> None:
        super().__init__(model)
        self.share = share

    def update_weights(self, model: PreTrainedModel) -> None:
        state = list(model.state_dict().items())
        with self.changed:
            self.model.load_state_dict(dict(state[: int(self.share * len(state))]), strict=False)
            self.version += 1


class Retracts(ConformingEngine):
    """Retracts what is in flight over an update, and gives the rows that it makes as it reads that again."""

    def update_weights(self, model: PreTrainedModel) -> None:
        self.pause("retract")
        super().update_weights(model)
        self.go_on()

    def answer(self, running: Running, sampling: Sampling, name: str) -> Answer:
        was = self.retractions
        answer = super().answer(running, sampling, name)
        if self.retractions == was:
            return answer
        return replace(answer, routed_experts=self.rows_of([*running.prompt, *answer.token_ids])[:-1])


SLOW: dict[str, Any] = {"token_seconds": TOKEN_SECONDS}
SHIFTED = rows(lambda routes: np.roll(routes, 1, 0))
LATE = answers("log_probs", lambda prompt, answer: np.roll(answer.log_probs, 1))
WAYS = "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty together"


def of_prompt_when_cut(prompt: Sequence[int], answer: Answer) -> Any:
    return answer.routed_experts[: len(prompt) if answer.finish_reason == "abort" else None]


def made_again(engine: Any, prompt: Sequence[int], _: Answer, whole: Answer) -> Any:
    """The rows of an answer that continued are those of the weights of now."""
    return engine.rows_of([*prompt, *whole.token_ids])[:-1]


FAULTS: Mapping[str, Mapping[str, Fault]] = {
    "rows": {
        "the first is missing": rows(lambda routes: routes[1:]),
        "one in the middle is unknown": rows(lambda routes: np.insert(routes[1:], len(routes) // 2, -1, 0)),
        "two too many": rows(lambda routes: np.concatenate([routes, routes[:2]])),
    },
    "dtype": {
        "int32": rows(lambda routes: routes.astype(np.int32)),
        "uint8": rows(lambda routes: zeros_for_dense(routes).astype(np.uint8)),
        "float": rows(lambda routes: routes.astype(np.float32)),
    },
    "dense_layers": {"zeros": rows(zeros_for_dense)},
    "last_token": {"filled": rows(lambda routes: np.concatenate([routes, routes[-1:]]))},
    "values": {
        "out of range": rows(lambda routes: with_values(routes, (0, 1, 0), 100)),
        "one twice": rows(lambda routes: with_values(routes, (-1, 2, 1), routes[-1, 2, 0])),
    },
    "native_routes": {
        "shifted by one": SHIFTED,
        "another order of layers": rows(layers_swapped),
        "experts off by one": rows(lambda routes: np.where(routes < 0, routes, (routes + 1) % 8)),
        "a layer unknown": rows(lambda routes: np.where(np.arange(3)[:, None] == 2, -1, routes).astype(np.int8)),
        "layers without a router left out": rows(lambda routes: routes[:, 1:]),
    },
    "replay_parity": {
        "shifted by one": SHIFTED,
        "another order of layers": rows(layers_swapped),
        "log-probs of the token before": LATE,
        "no number": answers("log_probs", lambda prompt, answer: answer.log_probs * np.nan),
    },
    "prefix_cache": {
        "rows missing": rows_of(lambda prompt, routes, cached: with_values(routes, slice(cached), -1)),
        "rows of others": rows_of(stale_cached),
    },
    "chunked_prefill": {
        "first chunk missing": rows_of(lambda prompt, routes, _: with_values(routes, slice(len(prompt) // 2), -1)),
        "swapped": rows_of(chunks_swapped),
    },
    "samples": {
        "shared rows": lambda model: Groups(model, shared_rows),
        "one answer": lambda model: Groups(model, lambda group: group[:1]),
    },
    "log_probs[plain]": {"of the token before": LATE},
    **{
        f"log_probs[{way}]": {"unprocessed": lambda model: ConformingEngine(model, raw_log_probs=True)}
        for way in WAYS.split()
    },
    "abort": {
        "as if finished": answers("finish_reason", lambda prompt, answer: "length", **SLOW),
        "rows of the prompt only": answers("routed_experts", of_prompt_when_cut, **SLOW),
        "ignored": IgnoresAborts,
    },
    "resume": {
        "rows made again": resumed("routed_experts", made_again),
        "rows twice": resumed(  # the second part's were appended whole
            "routed_experts", lambda _, __, first, whole: np.concatenate([first.routed_experts, whole.routed_experts])
        ),
        "log-probs made again": resumed("log_probs", lambda _, __, ___, whole: whole.log_probs - 0.01),
        "begun again": lambda model: BeginsAgain(model, **SLOW),
    },
    "resumed_tail": {"read again by its own routes": lambda model: ConformingEngine(model, is_live=True, **SLOW)},
    "versions": {
        "of the update before": versions(lambda versions: versions - 1),
        "one too few": versions(lambda versions: versions[1:]),
    },
    "update": {
        "half of the weights": lambda model: Takes(model, 0.5),
        "none of the weights": lambda model: Takes(model, 0.0),
    },
    "versions_over_update": {
        "all the first": versions(lambda versions: np.full_like(versions, versions[0]), **SLOW),
        "all the last": versions(lambda versions: np.full_like(versions, versions[-1]), **SLOW),
        "a token late": versions(lambda versions: np.concatenate([versions[:1], versions[:-1]]), **SLOW),
    },
    "rows_over_update": {"made again": lambda model: Retracts(model, **SLOW)},
}
"""By the name of a check, engines that it must refuse."""
