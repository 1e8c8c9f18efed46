"""Judges whether an answer is correct, by the model and by the shape that routes must have.

Letters: P prompt tokens, G generated tokens, T = P + G, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import RoutingError
from torchrl_moe.testing.conformance.adapter import Answer, NotOffered, Sampling, Values
from torchrl_moe.testing.conformance.reference import Followed, Reference
from torchrl_moe.testing.conformance.report import DoesNotHold, RouteFaults, Settings


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer together with its prompt."""

    prompt: tuple[int, ...]
    sampling: Sampling
    answer: Answer

    @property
    def tokens(self) -> list[int]:
        """The answer's ids ``[G]``."""
        return [int(token) for token in self.answer.token_ids]

    @property
    def ids(self) -> Tensor:
        """Prompt and answer, int64 ``[T]``."""
        return torch.tensor([*self.prompt, *self.tokens])

    def with_routes(self, routes: Values) -> Sampled:
        """Return the same with other routes."""
        return replace(self, answer=replace(self.answer, routed_experts=routes))

    @property
    def log_probs(self) -> Tensor:
        """Log-probs of the answer's tokens, float32 ``[G]``."""
        if self.answer.log_probs is None:
            raise NotOffered("answers have no log-probs")
        values = torch.tensor([float(value) for value in self.answer.log_probs])
        if len(values) != len(self.tokens):
            raise DoesNotHold(f"{len(values)} log-probs for {len(self.tokens)} tokens")
        return values

    @property
    def versions(self) -> list[int]:
        """Versions of the answer's tokens; errors as of :attr:`log_probs`."""
        if self.answer.versions is None:
            raise NotOffered("answers have no versions")
        values = [int(value) for value in self.answer.versions]
        if len(values) != len(self.tokens):
            raise DoesNotHold(f"{len(values)} versions for {len(self.tokens)} tokens")
        return values


# The distribution that a token was sampled from, by transformers' own logits processors.
#
# Only presence and frequency penalties, which transformers does not have, are written here.
#
# Letters: T tokens, P of the prompt, G of the answer, V vocabulary.


def sampled_log_probs(logits: Tensor, ids: Tensor, prompt_tokens: int, sampling: Sampling) -> Tensor:
    """Return the log-probs float32 ``[G]`` of an answer's tokens under the distribution that each was sampled from.

    Penalties come first, then the temperature, then top-k, top-p and min-p. A token that they exclude has -inf.

    >>> logits = torch.tensor([[0.0, 0.0, -9.0]]).expand(3, 3)
    >>> sampled_log_probs(logits, torch.tensor([2, 0, 1]), 1, Sampling(top_k=2)).exp()
    tensor([0.5000, 0.5000])
    """
    found = []
    # One position at a time: penalties depend on the tokens before it.
    for place in range(prompt_tokens, len(ids)):
        seen, row = ids[None, :place], logits[None, place - 1].clone()
        for processor in _processors(sampling):
            row = processor(seen, row)
            # right behind transformers' own penalty and before the temperature, as in vLLM
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


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges answers."""

    settings: Settings
    given_layout: RoutingLayout | None
    given_reference: Reference | None

    def by(self, reference: Reference) -> Judge:
        """Return a judge with other weights."""
        return replace(self, given_reference=reference)

    @property
    def layout(self) -> RoutingLayout:
        """The layout of the model's routers."""
        if self.given_layout is None:
            raise NotOffered("nothing says which layers have routers: pass model= or layout=, of a model that has some")
        return self.given_layout

    @property
    def reference(self) -> Reference:
        """The reference over the model."""
        if self.given_reference is None:
            raise NotOffered("there is no model to compare with: pass model=")
        return self.given_reference

    def routes(self, sampled: Sampled) -> NDArray[np.int64]:
        """Return an answer's routes as delivered, int64 ``[R, L, K]``."""
        if sampled.answer.routed_experts is None:
            raise NotOffered("answers have no routed_experts")
        given = np.asarray(sampled.answer.routed_experts)
        wanted = (self.layout.num_layers, self.layout.top_k)
        if given.ndim != 3 or given.shape[1:] != wanted or given.dtype.kind not in "iu":
            raise DoesNotHold(
                f"routes are {given.dtype} {list(given.shape)}, not integers [tokens - 1, {wanted[0]}, {wanted[1]}]: "
                "all decoder layers count, also those without a router"
            )
        return given.astype(np.int64)

    def known(self, sampled: Sampled) -> NDArray[np.bool_]:
        """Return a mask of the first T - 1 tokens and the layers with a router: True where there is a route."""
        rows = self.routes(sampled)[: len(sampled.ids) - 1, list(self.layout.moe_layers)]
        known = np.zeros((len(sampled.ids) - 1, rows.shape[1]), bool)
        known[: len(rows)] = (rows >= 0).any(-1)
        return known

    def follow(self, sampled: Sampled, tokens: int | None = None) -> Followed:
        """Run the model over an answer, following the routes that came with it."""
        count = len(sampled.ids) if tokens is None else tokens
        # what stands on layers without a router is another check's finding
        rows = torch.from_numpy(self.routes(sampled))[: count - 1].clone()
        rows[:, list(self.layout.dense_layers)] = -1
        try:
            return self.reference.follow(sampled.ids[:count], rows)
        except RoutingError as error:
            raise DoesNotHold(str(error)) from error

    def faults(self, sampled: Sampled, tokens: int | None = None) -> RouteFaults:
        """Return how correct an answer's routes are; arguments as of :meth:`follow`."""
        count = len(sampled.ids) if tokens is None else tokens
        known = self.known(sampled)[: count - 1]
        missing = int((~known).sum())
        if self.given_reference is None:
            return RouteFaults(known.size, missing, None, first=_first(~known, self.layout.moe_layers))
        # A row is wrong if its worst expert scores less than the best one left out by more than a tie.
        gaps = self.follow(sampled, tokens).gaps[: count - 1, list(self.layout.moe_layers)].numpy()
        wrong = gaps > self.settings.tie
        ties = int(((gaps > 0) & ~wrong).sum())
        first = _first(wrong | ~known, self.layout.moe_layers)
        return RouteFaults(known.size, missing, int(wrong.sum()), ties, float(gaps.max(initial=0.0)), first)

    def parity(self, sampled: Sampled, since: int = 0, tokens: int | None = None) -> float:
        """Return max |log-prob, engine - model that follows the routes|."""
        count = len(sampled.ids) if tokens is None else tokens
        logits, prompt = self.follow(sampled, count).logits, len(sampled.prompt)
        own = sampled_log_probs(logits, sampled.ids[:count], prompt, sampled.sampling)
        return _largest((sampled.log_probs[: count - prompt] - own)[since:])

    def gap(self, sampled: Sampled) -> tuple[float, float]:
        """Return max |log-prob, engine - model|, and what it would be if the engine returned unprocessed log-probs.

        The model chooses its own routes. Only at a tie it follows the engine.
        """
        given = sampled.log_probs
        prompt = len(sampled.prompt)
        logits = self.reference.logits(sampled.ids)
        off = self._distance(given, logits, sampled)
        # Rounding may have decided a tie otherwise in the engine: its choice is then as right as the model's.
        if off > self.settings.tolerance and sampled.answer.routed_experts is not None:
            sided = self._sided(sampled)
            if sided is not None:
                logits = sided
                off = self._distance(given, logits, sampled)
        own = logits[prompt - 1 : -1].log_softmax(-1).gather(1, sampled.ids[prompt:, None])[:, 0]
        return off, _largest(own - sampled_log_probs(logits, sampled.ids, prompt, sampled.sampling))

    def fitting(self, sampled: Sampled) -> int:
        """Return how many leading tokens of a plain answer have log-probs of these weights; ties as in :meth:`gap`."""
        count = self._fitting(self.reference.logits(sampled.ids), sampled)
        sided = None if count == len(sampled.tokens) else self._sided(sampled)
        return count if sided is None else max(count, self._fitting(sided, sampled))

    def _fitting(self, logits: Tensor, sampled: Sampled) -> int:
        own = sampled_log_probs(logits, sampled.ids, len(sampled.prompt), sampled.sampling)
        other = ((own - sampled.log_probs).abs() > self.settings.tolerance).nonzero()
        return int(other[0]) if len(other) else len(own)

    def _distance(self, given: Tensor, logits: Tensor, sampled: Sampled) -> float:
        return _largest(given - sampled_log_probs(logits, sampled.ids, len(sampled.prompt), sampled.sampling))

    def _sided(self, sampled: Sampled) -> Tensor | None:
        """Return logits of the model that follows the engine only in tied rows; ``None`` if there are none."""
        try:
            gaps = self.follow(sampled).gaps
        except (DoesNotHold, NotOffered):  # another check reports faults of the routes
            return None
        tied = (gaps > 0) & (gaps <= self.settings.tie)
        if not tied.any():
            return None
        rows = torch.from_numpy(self.routes(sampled))[: len(gaps) - 1]
        return self.reference.follow(sampled.ids, rows.masked_fill(~tied[: len(rows), :, None], -1)).logits


def _largest(difference: Tensor) -> float:
    """Return the largest absolute value; infinite if one is NaN."""
    size = difference.abs()
    return float(torch.where(size.isnan(), torch.inf, size).max()) if len(size) else 0.0


def _first(faulty: NDArray[np.bool_], layers: Sequence[int]) -> str:
    """Return a text that says where the first fault is."""
    places = np.argwhere(faulty)
    if not len(places):
        return ""
    token, place = (int(value) for value in places[0])
    return f"; the first at token {token}, layer {layers[place]}"
