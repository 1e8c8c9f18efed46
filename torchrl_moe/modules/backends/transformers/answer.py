"""One answer of a request, as it grows: its tokens, what is known of each, and when it ends.

Letters: P prompt tokens, G tokens of the answer, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from torchrl_moe.data import UNSET_EXPERT, RoutingLayout
from torchrl_moe.modules.backends.kept_ids import KeptIds
from torchrl_moe.modules.backends.replica import CompletionOutput, OnResume
from torchrl_moe.modules.backends.request_routes import rows_of_answer
from torchrl_moe.modules.backends.transformers.sampling import Sampling
from torchrl_moe.modules.backends.transformers.words import Words

__all__ = ["Answer", "Draw"]

Rows = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampled token.

    Attributes:
        token: its id.
        log_prob: under the distribution that it was drawn from.
        step: its words, as :class:`KeptIds` takes them: ``[0, *ids]``, empty if none was left out.
    """

    token: int
    log_prob: float
    step: NDArray[np.int32]


class Answer:
    """An answer that is being generated.

    Args:
        prompt_ids: ``[P]``.
        sampling: how it is sampled.
        index: which of the request's answers it is.
        words: the model's.
        max_model_len: tokens that prompt and answer may have.
        layout: the model's routers; ``None`` if no routes are recorded.

    Attributes:
        prompt_ids: its prompt's.
        tokens: those so far.
        followed: rows ``[rows, L, K]`` that its first positions follow, -1 where the model routes; ``None`` for none.
        how: how it reads its own tokens again, when it has to.
        finish_reason: ``"stop"`` or ``"length"``; ``None`` while it grows.
        generator: its own random numbers, if it has a seed.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        index: int,
        words: Words,
        max_model_len: int,
        layout: RoutingLayout | None,
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.sampling, self.index = sampling, index
        self.tokens: list[int] = []
        self.followed: Rows | None = None
        self.how: OnResume = "forced"
        self.finish_reason: str | None = None
        self.generator: torch.Generator | None = None
        room = max_model_len - len(self.prompt_ids)
        self.limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self._words, self._layout = words, layout
        self._text = ""
        self._stop_reason: int | str | None = None
        self._log_probs: list[float] | None = [] if sampling.logprobs else None
        self._versions: list[int] = []
        self._steps: list[NDArray[np.int32]] = []
        self._rows: list[Rows] | None = None if layout is None else []
        self._rows_held = 0
        self._given: CompletionOutput | None = None
        self._resume: OnResume | Literal["none"] = "none"
        self._stream = words.stream(self.prompt_ids, sampling.skip_special_tokens)

    @property
    def ids(self) -> list[int]:
        """All tokens so far, ``[P + G]``."""
        return self.prompt_ids + self.tokens

    @property
    def longest(self) -> int:
        """Tokens that it may have at most, with its prompt."""
        return len(self.prompt_ids) + self.limit

    @property
    def masked(self) -> list[int]:
        """Words that cannot come yet, since they would end it before ``min_tokens``."""
        if len(self.tokens) >= self.sampling.min_tokens:
            return []
        eos = () if self._words.eos is None else (self._words.eos,)
        return sorted({*eos, *self._words.more_eos, *self.sampling.stop_token_ids})

    # -- growing ----------------------------------------------------------------------------------------------------

    def go_on_from(self, given: CompletionOutput) -> None:
        """Continue from what an earlier request generated of it.

        Raises:
            ValueError: it already has as many tokens as it may have.
        """
        had = given.token_ids.tolist()
        if len(had) >= self.limit:
            raise ValueError(
                f"answer {self.index} to resume has {len(had)} tokens already: max_tokens={self.sampling.max_tokens} "
                "must be larger"
            )
        self.tokens, self._given, self._resume = had, given, given.resume
        self._versions = given.policy_versions.tolist()
        self._text = "".join(map(self._stream.step, had)) if self.sampling.detokenize else ""
        if given.logprobs is None or self._log_probs is None:
            self._log_probs = None
        else:
            self._log_probs = given.logprobs.tolist()
        if given.routed_experts is None or self._layout is None:
            self._rows = None
        else:
            self._rows = [rows_of_answer(given.routed_experts, self._layout)]
            self._rows_held = len(given.routed_experts)

    def rows_to_follow(self) -> Rows | None:
        """Return what it follows when all of :attr:`ids` are read, ``[P + G, L, K]``; ``None`` if the model routes."""
        rows = self.followed
        if self.tokens and self.how == "forced" and self._rows:
            rows = np.concatenate(self._rows)
        if rows is None:
            return None
        known = np.full((len(self.ids), *rows.shape[1:]), UNSET_EXPERT, rows.dtype)
        known[: len(rows)] = rows
        return known

    def note_read(self) -> None:
        """Note that all of its tokens are read: for the first time if it has none of its own, else again."""
        if self.tokens:
            live = self.how == "live" or not self._rows or self._resume == "live"
            self._resume = "live" if live else "forced"

    def add_rows(self, rows: Rows) -> None:
        """Take the rows of the last positions that were computed; those of positions that have some already stay.

        Args:
            rows: ``[rows, L, K]``, up to that of the last token.
        """
        if self._rows is not None:
            tokens = len(self.prompt_ids) + len(self.tokens)
            self._rows.append(rows[len(rows) - (tokens - self._rows_held) :])
            self._rows_held = tokens

    def add(self, draw: Draw, version: int) -> None:
        """Take its next token."""
        self.tokens.append(draw.token)
        self._versions.append(version)
        if self._log_probs is not None:
            self._log_probs.append(draw.log_prob)
        self._steps.append(draw.step)
        self._end(draw.token)

    def _end(self, token: int) -> None:
        """End it if this token does: as a stop token, as the end of a stop string, or as the last one allowed."""
        sampling = self.sampling
        if not sampling.ignore_eos and token == self._words.eos:
            self.finish_reason = "stop"
        elif token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self._words.more_eos):
            self.finish_reason, self._stop_reason = "stop", token
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        if not sampling.detokenize or (self.finish_reason == "stop" and not sampling.include_stop_str_in_output):
            return  # the token that ends it is not part of the text
        begun = len(self._text)
        self._text += self._stream.step(token)
        if len(self.tokens) > sampling.min_tokens and (match := self._match(begun)) is not None:
            start, stop = match
            self.finish_reason, self._stop_reason = "stop", stop
            self._text = self._text[: start + (len(stop) if sampling.include_stop_str_in_output else 0)]

    def _match(self, begun: int) -> tuple[int, str] | None:
        """Return the start of the first stop string to end after ``begun``, and the string."""
        found = []
        for stop in self.sampling.stop:
            start = self._text.find(stop, max(begun - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    # -- what there is of it ----------------------------------------------------------------------------------------

    def output(self, with_routes: bool) -> CompletionOutput:
        """Return it as it is; one that still grows counts as cut."""
        return CompletionOutput(
            index=self.index,
            token_ids=np.array(self.tokens, np.int64),
            text=self._text,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self._stop_reason,
            policy_versions=np.array(self._versions, np.int32),
            logprobs=None if self._log_probs is None else np.array(self._log_probs, np.float32),
            routed_experts=self._routes() if with_routes and self.tokens else None,
            kept=self._kept(),
            resume=self._resume,
        )

    def _kept(self) -> KeptIds | None:
        if self._log_probs is None:
            return None
        had = None if self._given is None else self._given.kept
        steps = [np.concatenate([[i], step[1:]]).astype(np.int32) for i, step in enumerate(self._steps) if len(step)]
        parts = [len(self.tokens) - len(self._steps), len(self._steps)]
        return KeptIds.join([had, KeptIds.of_steps(steps, parts[1])], parts)

    def _routes(self) -> NDArray[np.unsignedinteger[Any]] | None:
        """Return ``[P + G - 1, L, K]`` as engines give them: unsigned, zero where there is no router."""
        if not self._rows or self._layout is None:
            return None
        rows = np.concatenate(self._rows)[: len(self.ids) - 1]
        return np.maximum(rows, 0).astype(np.uint8 if self._layout.num_experts <= 256 else np.uint16)
