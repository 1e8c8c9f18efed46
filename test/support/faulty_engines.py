"""Engines with a fault each, by the check that must see it; and the conforming one that has none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from support.conforming_engine import ConformingEngine, Running
from torchrl_moe.testing.conformance import Answer, Sampling

Change = Callable[[Sequence[int], Answer], Answer]
TOKEN_SECONDS = 0.005


class Changed(ConformingEngine):
    """Gives answers that a function of prompt and answer has spoilt."""

    def __init__(self, model: PreTrainedModel, change: Change, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.change = change

    def answer(self, running: Running, sampling: Sampling, name: str) -> Answer:
        return self.change(running.prompt, super().answer(running, sampling, name))


def rows(change: Callable[[Any], Any]) -> Callable[[PreTrainedModel], ConformingEngine]:
    """An engine whose routes ``[T - 1, L, K]`` a function has spoilt."""

    def changed(prompt: Sequence[int], answer: Answer) -> Answer:
        return replace(answer, routed_experts=change(answer.routed_experts))

    return lambda model: Changed(model, changed)


def answers(change: Change, **kwargs: Any) -> Callable[[PreTrainedModel], ConformingEngine]:
    return lambda model: Changed(model, change, **kwargs)


# -- what routes look like --------------------------------------------------------------------------------------------


def with_last_row(routes: Any) -> Any:
    return np.concatenate([routes, routes[-1:]])


def zeros_for_dense(routes: Any) -> Any:
    return np.where(routes < 0, 0, routes)


def one_out_of_range(routes: Any) -> Any:
    spoilt = routes.copy()
    spoilt[0, 1, 0] = 100
    return spoilt


def one_twice(routes: Any) -> Any:
    spoilt = routes.copy()
    spoilt[-1, 2, 1] = spoilt[-1, 2, 0]
    return spoilt


# -- whose routes they are --------------------------------------------------------------------------------------------


def layers_swapped(routes: Any) -> Any:
    return routes[:, [0, 2, 1]]


def without_cached(prompt: Sequence[int], answer: Answer) -> Answer:
    spoilt = answer.routed_experts.copy()
    spoilt[: answer.num_cached_tokens] = -1
    return replace(answer, routed_experts=spoilt)


def stale_cached(prompt: Sequence[int], answer: Answer) -> Answer:
    """Rows of some other request in the blocks that were cached."""
    spoilt = answer.routed_experts.copy()
    cached = answer.num_cached_tokens
    spoilt[:cached, 1:] = np.flip(spoilt[:cached, 1:], 0)
    return replace(answer, routed_experts=spoilt)


def without_first_chunk(prompt: Sequence[int], answer: Answer) -> Answer:
    spoilt = answer.routed_experts.copy()
    spoilt[: len(prompt) // 2] = -1
    return replace(answer, routed_experts=spoilt)


def chunks_swapped(prompt: Sequence[int], answer: Answer) -> Answer:
    middle = len(prompt) // 2
    head, tail, rest = np.split(answer.routed_experts, [middle, 2 * middle])
    return replace(answer, routed_experts=np.concatenate([tail, head, rest]))


class SharesRows(ConformingEngine):
    """All answers to a prompt have the rows of the first."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[list[Answer]]:
        return [
            [replace(one, routed_experts=group[0].routed_experts) for one in group]
            for group in super().generate(prompts, sampling, request_ids)
        ]


class LosesAnswers(ConformingEngine):
    """Of several answers to a prompt it gives the first."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[list[Answer]]:
        return [group[:1] for group in super().generate(prompts, sampling, request_ids)]


# -- log-probs --------------------------------------------------------------------------------------------------------


def raw(model: PreTrainedModel) -> ConformingEngine:
    return ConformingEngine(model, raw_log_probs=True)


def log_probs_late(prompt: Sequence[int], answer: Answer) -> Answer:
    return replace(answer, log_probs=np.roll(answer.log_probs, 1))


# -- interruptions ----------------------------------------------------------------------------------------------------


def says_length(prompt: Sequence[int], answer: Answer) -> Answer:
    return replace(answer, finish_reason="length")


def cut_without_rows(prompt: Sequence[int], answer: Answer) -> Answer:
    """An answer that was cut has its prompt's rows only."""
    if answer.finish_reason != "abort":
        return answer
    return replace(answer, routed_experts=answer.routed_experts[: len(prompt)])


class IgnoresAborts(ConformingEngine):
    def abort(self, request_ids: Sequence[str]) -> None:
        time.sleep(0)


class RoutesAgain(ConformingEngine):
    """The rows of an answer that continued are those of the weights of now."""

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        whole = super().resume(prompt, answer, sampling)
        return replace(whole, routed_experts=self.rows_of([*prompt, *whole.token_ids])[:-1])


class RowsTwice(ConformingEngine):
    """Rows of the first part stand twice: the second part's were appended whole."""

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        whole = super().resume(prompt, answer, sampling)
        return replace(whole, routed_experts=np.concatenate([answer.routed_experts, whole.routed_experts]))


class ScoresAgain(ConformingEngine):
    """Log-probs of an answer that continued are all of the weights of now."""

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        whole = super().resume(prompt, answer, sampling)
        return replace(whole, log_probs=whole.log_probs - 0.01)


class BeginsAgain(ConformingEngine):
    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        ((again,),) = self.generate([prompt], sampling)
        return again


# -- weights ----------------------------------------------------------------------------------------------------------


def version(of: Callable[[Any], Any]) -> Change:
    """Versions ``[G]`` that a function has spoilt."""
    return lambda prompt, answer: replace(answer, versions=of(answer.versions))


class TakesHalf(ConformingEngine):
    """Loads the first half of the weights."""

    def update_weights(self, model: PreTrainedModel) -> None:
        state = model.state_dict()
        half = dict(list(state.items())[: len(state) // 2])
        with self.changed:
            self.model.load_state_dict(half, strict=False)
            self.version += 1


class Keeps(ConformingEngine):
    """Takes weights, and serves those that it had."""

    def update_weights(self, model: PreTrainedModel) -> None:
        self.version += 1


class RoutesRetractedAgain(ConformingEngine):
    """Gives the rows that it makes as it reads a retracted request again, beside the log-probs of before."""

    def answer(self, running: Running, sampling: Sampling, name: str) -> Answer:
        was = self.retractions
        answer = super().answer(running, sampling, name)
        if self.retractions == was:
            return answer
        return replace(answer, routed_experts=self.rows_of([*running.prompt, *answer.token_ids])[:-1])


class Retracts(RoutesRetractedAgain):
    """Retracts what is in flight over an update."""

    def update_weights(self, model: PreTrainedModel) -> None:
        self.pause("retract")
        super().update_weights(model)
        self.go_on()


def slow(kind: Callable[..., ConformingEngine], **kwargs: Any) -> Callable[[PreTrainedModel], ConformingEngine]:
    return lambda model: kind(model, token_seconds=TOKEN_SECONDS, **kwargs)


Fault = Callable[[PreTrainedModel], Any]

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
    "last_token": {"filled": rows(with_last_row)},
    "values": {"out of range": rows(one_out_of_range), "one twice": rows(one_twice)},
    "native_routes": {
        "shifted by one": rows(lambda routes: np.roll(routes, 1, 0)),
        "another order of layers": rows(layers_swapped),
        "experts off by one": rows(lambda routes: np.where(routes < 0, routes, (routes + 1) % 8)),
        "a layer unknown": rows(lambda routes: np.where(np.arange(3)[:, None] == 2, -1, routes).astype(np.int8)),
        "layers without a router left out": rows(lambda routes: routes[:, 1:]),
    },
    "replay_parity": {
        "shifted by one": rows(lambda routes: np.roll(routes, 1, 0)),
        "another order of layers": rows(layers_swapped),
        "log-probs of the token before": answers(log_probs_late),
        "no number": answers(lambda prompt, answer: replace(answer, log_probs=answer.log_probs * np.nan)),
    },
    "prefix_cache": {"rows missing": answers(without_cached), "rows of others": answers(stale_cached)},
    "chunked_prefill": {"first chunk missing": answers(without_first_chunk), "swapped": answers(chunks_swapped)},
    "samples": {"shared rows": SharesRows, "one answer": LosesAnswers},
    "log_probs[plain]": {"of the token before": answers(log_probs_late)},
    "log_probs[temperature]": {"unprocessed": raw},
    "log_probs[top_k]": {"unprocessed": raw},
    "log_probs[top_p]": {"unprocessed": raw},
    "log_probs[min_p]": {"unprocessed": raw},
    "log_probs[repetition_penalty]": {"unprocessed": raw},
    "log_probs[presence_penalty]": {"unprocessed": raw},
    "log_probs[frequency_penalty]": {"unprocessed": raw},
    "log_probs[together]": {"unprocessed": raw},
    "abort": {
        "as if finished": answers(says_length, token_seconds=TOKEN_SECONDS),
        "rows of the prompt only": answers(cut_without_rows, token_seconds=TOKEN_SECONDS),
        "ignored": IgnoresAborts,
    },
    "resume": {
        "rows made again": slow(RoutesAgain),
        "rows twice": slow(RowsTwice),
        "log-probs made again": slow(ScoresAgain),
        "begun again": slow(BeginsAgain),
    },
    "resumed_tail": {"read again by its own routes": slow(ConformingEngine, is_live=True)},
    "versions": {
        "of the update before": answers(version(lambda versions: versions - 1)),
        "one too few": answers(version(lambda versions: versions[1:])),
    },
    "update": {"half of the weights": TakesHalf, "none of the weights": Keeps},
    "versions_over_update": {
        "all the first": answers(
            version(lambda versions: np.full_like(versions, versions[0])), token_seconds=TOKEN_SECONDS
        ),
        "all the last": answers(
            version(lambda versions: np.full_like(versions, versions[-1])), token_seconds=TOKEN_SECONDS
        ),
        "a token late": answers(
            version(lambda versions: np.concatenate([versions[:1], versions[:-1]])), token_seconds=TOKEN_SECONDS
        ),
    },
    "rows_over_update": {"made again": slow(Retracts)},
}
"""By the name of a check, engines that it must refuse."""
