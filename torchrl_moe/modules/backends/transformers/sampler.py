"""Draws tokens from logits, each row as its answer asks: the processors are transformers', their order is vLLM's.

Letters: R answers, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchrl_moe.modules.backends.kept_ids import name_kept
from torchrl_moe.modules.backends.transformers.answer import Answer, Draw
from torchrl_moe.modules.backends.transformers.sampling import Sampling

__all__ = ["Sampler"]

NOTHING = np.empty(0, np.int32)


class Sampler:
    """Draws the next token of each answer of a batch.

    Args:
        device: of the logits.
        seed: of the random numbers for answers without a seed of their own.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def seed(self, seed: int) -> None:
        """Seed the random numbers again."""
        self._generator.manual_seed(seed)

    def __call__(self, logits: Tensor, answers: Sequence[Answer]) -> list[Draw]:
        """Return the next token of each answer; those that sample alike are drawn together.

        Args:
            logits: ``[R, V]``, of the answers in order.
            answers: R.
        """
        alike: dict[Sampling, list[int]] = {}
        for row, answer in enumerate(answers):
            alike.setdefault(answer.sampling, []).append(row)
        draws: dict[int, Draw] = {}
        for sampling, rows in alike.items():
            drawn = self._draw(logits[rows].float(), sampling, [answers[row] for row in rows])
            draws.update(zip(rows, drawn, strict=True))
        return [draws[row] for row in range(len(answers))]

    def _draw(self, logits: Tensor, sampling: Sampling, answers: Sequence[Answer]) -> list[Draw]:
        logits = _processed(logits, sampling, answers)
        log_probs = logits.log_softmax(-1)
        if sampling.is_greedy:
            tokens = logits.argmax(-1)
        else:  # an exponential race: each word's clock rings at the rate of its probability, and the first one wins
            tokens = (log_probs.exp() / self._noise(log_probs, answers)).argmax(-1)
        chosen = log_probs.gather(-1, tokens[:, None])[:, 0].tolist()
        steps = [NOTHING] * len(answers)
        if sampling.logprobs and sampling.leaves_words_out:
            named = name_kept(log_probs, [0] * len(answers))
            if named is not None:
                flat, offsets = named
                steps = [flat[start:stop] for start, stop in pairwise(offsets)]
        return [Draw(*one) for one in zip(tokens.tolist(), chosen, steps, strict=True)]

    def _noise(self, like: Tensor, answers: Sequence[Answer]) -> Tensor:
        noise = torch.empty_like(like)
        own = [row for row, answer in enumerate(answers) if answer.generator is not None]
        if len(own) < len(answers):
            noise.exponential_(generator=self._generator)
        for row in own:
            noise[row].exponential_(generator=answers[row].generator)
        return noise


def _processed(logits: Tensor, sampling: Sampling, answers: Sequence[Answer]) -> Tensor:
    """Return the logits ``[R, V]`` of what is drawn from, -inf for words that are left out."""
    for row, answer in enumerate(answers):
        if sampling.repetition_penalty != 1:
            ids = torch.tensor([answer.ids], device=logits.device)
            penalise = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
            logits[row] = penalise(ids, logits[row : row + 1])[0]
        if answer.tokens and (sampling.frequency_penalty or sampling.presence_penalty):
            words, counts = torch.tensor(answer.tokens, device=logits.device).unique(return_counts=True)
            logits[row, words] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        if masked := [word for word in answer.masked if word < logits.shape[1]]:
            logits[row, masked] = float("-inf")
    for warp in _warpers(sampling):
        logits = warp(None, logits)
    return logits


@lru_cache(maxsize=256)
def _warpers(sampling: Sampling) -> tuple[Callable[[None, Tensor], Tensor], ...]:
    """Return the temperature, then what leaves words out, in vLLM's order; a greedy answer has neither."""
    if sampling.is_greedy:
        return ()
    wanted: tuple[tuple[bool, Callable[[], Any]], ...] = (
        (sampling.temperature != 1, lambda: TemperatureLogitsWarper(float(sampling.temperature))),
        (sampling.min_p > 0, lambda: MinPLogitsWarper(float(sampling.min_p))),
        (sampling.top_k > 0, lambda: TopKLogitsWarper(int(sampling.top_k))),
        (sampling.top_p < 1, lambda: TopPLogitsWarper(float(sampling.top_p))),
    )
    return tuple(make() for is_wanted, make in wanted if is_wanted)
