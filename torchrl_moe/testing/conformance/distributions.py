"""The distribution that a token was sampled from, by transformers' own logits processors.

Only presence and frequency penalties, which transformers does not have, are written here.

Letters: T tokens, P of the prompt, G of the answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchrl_moe.testing.conformance.adapter import Sampling

__all__ = ["sampled_log_probs"]


def sampled_log_probs(logits: Tensor, ids: Tensor, prompt_tokens: int, sampling: Sampling) -> Tensor:
    """Return the log-probs float32 ``[G]`` of an answer's tokens under the distribution that each was sampled from.

    Penalties come first, then the temperature, then top-k, top-p and min-p. A token that they exclude has -inf.

    Args:
        logits: ``[T, V]``, each row for the token that follows.
        ids: ``[T]``, prompt and answer.
        prompt_tokens: P.
        sampling: how the answer was sampled.

    >>> logits = torch.tensor([[0.0, 0.0, -9.0]]).expand(3, 3)
    >>> sampled_log_probs(logits, torch.tensor([2, 0, 1]), 1, Sampling(top_k=2)).exp()
    tensor([0.5000, 0.5000])
    """
    found = []
    for place in range(prompt_tokens, len(ids)):
        seen, row = ids[None, :place], logits[None, place - 1].clone()
        for processor in _processors(sampling):
            row = processor(seen, row)
            if isinstance(processor, RepetitionPenaltyLogitsProcessor):
                row = _penalised(row, ids[prompt_tokens:place], sampling)
        found.append(row.log_softmax(-1)[0, ids[place]])
    return torch.stack(found) if found else logits.new_zeros(0)


def _processors(sampling: Sampling) -> Iterator[LogitsProcessor]:
    yield RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
    yield TemperatureLogitsWarper(float(sampling.temperature))
    if sampling.top_k > 0:
        yield TopKLogitsWarper(int(sampling.top_k))
    if sampling.top_p < 1:
        yield TopPLogitsWarper(float(sampling.top_p))
    if sampling.min_p > 0:
        yield MinPLogitsWarper(float(sampling.min_p))


def _penalised(row: Tensor, answer: Tensor, sampling: Sampling) -> Tensor:
    """Subtract presence and frequency penalties from a row ``[1, V]``; they count the answer's tokens so far."""
    counts = torch.bincount(answer, minlength=row.shape[-1]).to(row)
    return row - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
