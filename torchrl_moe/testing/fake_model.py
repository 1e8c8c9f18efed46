"""The fake engine's answers: tokens, log-probs and routes as a pure function of seed, version and token prefix.

So a repeated request gets the same answer, and one that resumes an answer gets the rest of it. There is no model behind
it, and nothing here waits or fails. A script may set the answers instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from torchrl_moe.data import UNSET_EXPERT, RoutingLayout
from torchrl_moe.modules.backends.replica import CompletionOutput, KeptIds, Request
from torchrl_moe.modules.backends.request_routes import RequestRoutes
from torchrl_moe.modules.backends.vllm.continuation import join
from torchrl_moe.testing.byte_tokenizer import NUM_BYTES, ByteTokenizer

MAX_TOKENS = 16  # vLLM's default
Script: TypeAlias = "Callable[[str], str | None]"
"""Returns the answer to a prompt, which then ends its turn; ``None`` leaves it to the model."""


def tokens_to_come(request: Request) -> int:
    """Return the number of tokens that the longest of a request's answers still gets."""
    # answers that finished in their first part have nothing to come
    had = [] if request.resume is None else [len(o.token_ids) for o in request.resume.outputs if _is_cut(o)]
    limit = _max_tokens(request)
    if max(had, default=-1) >= limit:
        raise ValueError(f"an answer to resume has {max(had)} tokens already: max_tokens={limit} must be larger")
    return limit - min(had, default=0)


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model whose weights are three values."""

    seed: int
    version: int
    layout: RoutingLayout | None
    script: Script | None = None
    forced_routing_unavailable_reason: str = ""

    def checked(self, request: Request) -> Request:
        """Return a request as :meth:`answer` takes it, by the same rules as a real engine."""
        return RequestRoutes(self.layout, self.forced_routing_unavailable_reason).checked(request)

    def answer(self, request: Request, prompt: NDArray[np.int64], index: int, tokens: int) -> CompletionOutput:
        """Return an answer with up to ``tokens`` tokens more than what the request resumes."""
        first = None if request.resume is None else request.resume.outputs[index]
        if first is not None and not _is_cut(first):
            return first
        if first is not None and not len(first.token_ids):
            first = None  # cut before its first token: it begins again
        had = [] if first is None else first.token_ids.tolist()
        # of the first part, which the whole keeps
        known_rows = 0 if first is None or first.routed_experts is None else len(first.routed_experts)
        ids, limit = [*prompt.tolist(), *had], _max_tokens(request)
        # what the script sets, with the end of the turn
        text, scripted = None if self.script is None else self.script(_tokenizer().decode(prompt)), None
        if text is not None:
            scripted = [*_tokenizer().encode(text), _tokenizer().eos_token_id]
        length = limit if scripted is None else min(limit, len(scripted))
        count, seed = min(tokens, length - len(had)), request.param("seed")
        log_probs = self._extend(ids, index, count, scripted and scripted[len(had) :], seed)
        token_ids = np.array(ids[len(prompt) + len(had) :], np.int64)
        routes = self._routes(ids, request.routed_experts) if self.layout and request.return_routed_experts else None
        made = len(had) + len(token_ids)
        has_ended = scripted is not None and made == len(scripted)
        reason = "stop" if has_ended else "length" if made == limit else "abort"
        rest = CompletionOutput(
            index=index,
            token_ids=token_ids,
            text=text_of(token_ids.tolist()),
            finish_reason=reason,
            policy_versions=np.full(len(token_ids), self.version, np.int32),
            logprobs=None if request.param("logprobs") is None else np.array(log_probs, np.float32),
            routed_experts=None if routes is None else routes[known_rows:],
            kept=_kept(request, token_ids),
        )
        # Joined by the real engine's own function, so that a resumed fake answer is formed like a real one.
        how = RequestRoutes(self.layout, self.forced_routing_unavailable_reason).how_read(request, len(prompt), first)
        whole = join(index, first, rest, SimpleNamespace(detokenize=False), text_of, how)
        return replace(whole, text=text_of(whole.token_ids.tolist()))  # the cut may fall within a character

    def scores(self, request: Request, prompt: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Return the log-probs of a prompt's tokens ``[P]``, if requested: those of a first answer.

        They are divided by the temperature, which no real model does, to show that the temperature arrived.
        """
        if request.scoring is None:
            return None
        scores = np.full(len(prompt), np.nan, np.float32)  # nothing predicts the first token
        prefix = self._hash("token", 0, prompt[:1].tolist())
        for position, token in enumerate(prompt[1:].tolist(), 1):
            scores[position] = _log_prob(int.from_bytes(prefix.digest(), "little")) / request.scoring.temperature
            _feed(prefix, [token])
        return scores

    def _extend(
        self, ids: list[int], index: int, count: int, scripted: Sequence[int] | None, seed: int | None
    ) -> list[float]:
        """Add tokens, and return their log-probs; a request's own ``seed`` chooses other tokens, as a real one does."""
        log_probs = []
        prefix = self._hash("token", index, ids)
        for i in range(count):
            draw = int.from_bytes(prefix.digest(), "little")
            chosen = draw if seed is None else int(_rng(hashlib.blake2b(repr((seed, draw)).encode())).integers(1 << 60))
            ids.append(32 + chosen % 95 if scripted is None else scripted[i])  # printable ASCII
            log_probs.append(_log_prob(draw))
            _feed(prefix, ids[-1:])
        return log_probs

    def _routes(self, ids: Sequence[int], followed: NDArray[np.integer] | None) -> NDArray[np.unsignedinteger]:
        layout = self.layout
        assert layout is not None
        dtype = np.uint8 if layout.num_experts <= 256 else np.uint16  # as vLLM does
        rows = np.zeros((len(ids) - 1, layout.num_layers, layout.top_k), dtype)
        prefix = self._hash("route")
        for row, token in zip(rows, ids, strict=False):  # the last token has no row
            _feed(prefix, [token])
            rng = _rng(prefix)
            # a permutation: no expert twice; dense layers stay 0, as in vLLM's own buffer
            for layer in layout.moe_layers:
                row[layer] = rng.permutation(layout.num_experts)[: layout.top_k]
        # recorded experts stand in where there are any, entry by entry
        if followed is not None:
            known = rows[: len(followed)]
            np.copyto(known, followed[: len(known)], where=followed[: len(known)] != UNSET_EXPERT, casting="unsafe")
        return rows

    def _hash(self, what: str, index: int = 0, ids: Iterable[int] = ()) -> hashlib.blake2b:
        prefix = hashlib.blake2b(repr((what, self.seed, self.version, index)).encode(), digest_size=8)
        _feed(prefix, ids)
        return prefix


def _log_prob(draw: int) -> float:
    return math.log1p(-(draw >> 11) / (1 << 53))  # of a uniform number, so never above 0


def _feed(prefix: hashlib.blake2b, ids: Iterable[int]) -> None:
    # a fixed width per id: joined texts of [1, 23] and [12, 3] would be the same
    prefix.update(b"".join([token.to_bytes(8, "little", signed=True) for token in ids]))


def _rng(prefix: hashlib.blake2b) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(prefix.digest(), "little"))


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return ByteTokenizer()


def text_of(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token < NUM_BYTES).decode(errors="replace")


def _kept(request: Request, token_ids: NDArray[np.int64]) -> KeptIds | None:
    """Report that a top_k kept each token and the ids after it."""
    count = request.param("top_k") or 0
    if count <= 0 or request.param("logprobs") is None or not len(token_ids):
        return None
    ids = (token_ids[:, None] + np.arange(count)) % _tokenizer().vocab_size
    return KeptIds(ids.astype(np.int32).reshape(-1), np.full(len(token_ids), count, np.int32))


def _is_cut(output: CompletionOutput) -> bool:
    return output.finish_reason == "abort"


def _max_tokens(request: Request) -> int:
    given = request.param("max_tokens")
    return MAX_TOKENS if given is None else int(given)
