"""One answer of a request, as it grows: its tokens, what is known of each, and when it ends.

Letters: P prompt tokens, G tokens of the answer, L decoder layers, K experts per token.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from torchrl_moe.data import UNSET_EXPERT, RoutingLayout
from torchrl_moe.modules.backends.replica import CompletionOutput, KeptIds, OnResume
from torchrl_moe.modules.backends.request_routes import rows_of_answer
from torchrl_moe.modules.backends.sampling_fields import check_fields

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, PreTrainedTokenizerBase


# Text in and out of an engine: a model's tokenizer, and the text of an answer as its tokens come.


INVALID_PREFIX = "Invalid prefix encountered"  # the message of tokenizers for bytes that are no text


class LockedTokenizer:
    """A tokenizer that two threads use."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> None:
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"engine='transformers' needs a fast tokenizer, got {type(tokenizer).__name__}")
        self.backend, self.tokenizer = backend, tokenizer
        self.eos: int | None = tokenizer.eos_token_id
        named = getattr(generation_config, "eos_token_id", None)
        listed = [named] if isinstance(named, int) else list(named or ())
        self.more_eos = frozenset(listed) - {self.eos}
        self.lock = threading.Lock()  # encoding text changes the tokenizer for a moment

    def encode(self, text: str) -> list[int]:
        with self.lock:
            ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> TextStream:
        return TextStream(self, prompt_ids, skip_special_tokens)


class TextStream:
    """The text of one answer, token by token; a character whose bytes are not all there yet is not shown."""

    def __init__(self, tokenizer: LockedTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special_tokens)

    def step(self, token: int) -> str:
        text: str | None  # None for a part of a character
        backend = self._tokenizer.backend
        with self._tokenizer.lock:
            try:
                text = self._stream.step(backend, token)
            except Exception as error:  # the library has no error of its own
                if not str(error).startswith(INVALID_PREFIX):
                    raise
                self._stream = DecodeStream(skip_special_tokens=self._skips)
                text = self._stream.step(backend, token)
        return text or ""


# Reads what users pass as vLLM's ``SamplingParams``; what this engine does not serve is refused by name.


LEAST_TEMPERATURE = 1e-2  # vLLM's: it samples at this one where a lower one is asked for, except for 0

REFUSED: Mapping[str, tuple[object, ...]] = {
    "prompt_logprobs": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "logprob_token_ids": (None, []),
    "structured_outputs": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "extra_args": (None, {}),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "trace_decode_token_ids": (None, []),
}
"""Fields of vLLM that this engine does not serve -> values that ask for nothing."""
WITHOUT_EFFECT = {
    "flat_logprobs",
    "output_kind",
    "output_text_buffer_length",
    "routed_experts_prompt_start",  # all rows of a prompt are of tokens that it has read
    "skip_clone",
    "skip_reading_prefix_cache",
    "spaces_between_special_tokens",
    "stream_interval",
    "watermarking",
}
"""Fields about how vLLM delivers answers, or about features that this engine does not have; ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer is sampled: the fields of vLLM's ``SamplingParams``, with its names, defaults and limits.

    ``logprobs`` says whether log-probs are wanted, ``stop`` and ``stop_token_ids`` are tuples.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = field(default=None, compare=False)  # answers that differ in nothing else are drawn together
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def leaves_ids_out(self) -> bool:
        """Whether a token may be drawn from a part of the vocabulary only."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.min_tokens > 0

    def __post_init__(self) -> None:
        if self.stop and not self.detokenize:
            raise ValueError("sampling_params: stop strings need detokenize=True")
        if self.is_greedy and self.n > 1:
            raise ValueError(f"sampling_params: n={self.n} with temperature=0 would give one answer several times")


KNOWN = {field.name for field in dataclasses.fields(Sampling)}


def read_sampling(spec: object, guided_options: object = None) -> Sampling:
    """Return the sampling that a mapping of ``SamplingParams`` fields asks for; ``None`` is vLLM's default."""
    if not isinstance(spec, Mapping | None):
        raise ValueError(f"sampling_params must be a mapping, got {type(spec).__name__}")
    if guided_options is not None:
        raise ValueError("guided_options_request: engine='transformers' has no structured outputs; vLLM has")
    check_fields(spec)
    given = {name: value for name, value in (spec or {}).items() if name not in WITHOUT_EFFECT}
    for name, neutral in REFUSED.items():
        if (value := given.pop(name, None)) not in neutral:
            raise ValueError(f"sampling_params: engine='transformers' does not serve {name}={value!r}; vLLM does")
    if unknown := sorted(given.keys() - KNOWN):
        raise ValueError(f"sampling_params: unknown {', '.join(unknown)}; known: {', '.join(sorted(KNOWN))}")
    if given.get("logprobs") not in (None, 0):
        raise ValueError(
            f"sampling_params: logprobs={given['logprobs']!r}: a completion has the log-probs of its sampled tokens "
            "only, logprobs=0"
        )
    if "logprobs" in given:
        given["logprobs"] = given["logprobs"] is not None
    stop, stop_ids = given.get("stop"), given.get("stop_token_ids")
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    given["stop_token_ids"] = tuple(stop_ids or ())
    given["seed"] = None if given.get("seed") == -1 else given.get("seed")
    # values that mean the same become one, as in vLLM
    temperature = given.get("temperature", 1.0)
    if temperature == 0:
        given |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    elif 0 < temperature < LEAST_TEMPERATURE:
        given["temperature"] = LEAST_TEMPERATURE
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return Sampling(**given)


Rows = NDArray[np.integer]


def filled(rows: Rows, tokens: int) -> Rows:
    """Return a row for each of so many tokens, -1 where none is given."""
    known = np.full((tokens, *rows.shape[1:]), UNSET_EXPERT, rows.dtype)
    known[: len(rows)] = rows
    return known


@dataclass(frozen=True, slots=True)
class Draw:
    token: int
    log_prob: float
    mask: NDArray[np.int32]


class Answer:
    """An answer that is being generated; ``layout`` is ``None`` if no routes are recorded."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        index: int,
        tokenizer: LockedTokenizer,
        max_model_len: int,
        layout: RoutingLayout | None,
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.sampling, self.index = sampling, index
        self.tokens: list[int] = []
        # rows [rows, L, K] that its first positions follow, -1 where the model routes
        self.followed: Rows | None = None
        self.how: OnResume = "forced"  # how it reads its own tokens again, when it has to
        self.finish_reason: str | None = None  # None while it grows
        self.generator: torch.Generator | None = None  # its own random numbers, if it has a seed
        room = max_model_len - len(self.prompt_ids)
        self.limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self._tokenizer, self._layout = tokenizer, layout
        self._text = ""
        self._stop_reason: int | str | None = None
        self._log_probs: list[float] | None = [] if sampling.logprobs else None
        self._versions: list[int] = []
        self._masks: list[NDArray[np.int32]] = []  # of the tokens that it has not been given
        self._rows: list[Rows] | None = None if layout is None else []
        self._rows_held = 0
        self._given: CompletionOutput | None = None
        self._resume: OnResume | Literal["none"] = "none"
        self._stream = tokenizer.stream(self.prompt_ids, sampling.skip_special_tokens)

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
        """Token ids that cannot come yet, since they would end it before ``min_tokens``."""
        if len(self.tokens) >= self.sampling.min_tokens:
            return []
        eos = () if self._tokenizer.eos is None else (self._tokenizer.eos,)
        return sorted({*eos, *self._tokenizer.more_eos, *self.sampling.stop_token_ids})

    # -- growing ----------------------------------------------------------------------------------------------------

    def go_on_from(self, given: CompletionOutput) -> None:
        """Continue from what an earlier request generated of it."""
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
        # those that it lacks come when its tokens are read again
        if given.routed_experts is not None and self._layout is not None:
            self._rows = [rows_of_answer(given.routed_experts, self._layout)]
            self._rows_held = len(given.routed_experts)

    def rows_to_follow(self) -> Rows | None:
        """Return what it follows when all of :attr:`ids` are read, ``[P + G, L, K]``; ``None`` if the model routes."""
        rows = self.followed
        if self.tokens and self.how == "forced" and self._rows:
            rows = np.concatenate(self._rows)
        return None if rows is None else filled(rows, len(self.ids))

    def note_read(self) -> None:
        """Note that all of its tokens are read: for the first time if it has none of its own, else again."""
        if self.tokens:
            live = self.how == "live" or self._rows_held < len(self.ids) - 1 or self._resume == "live"
            self._resume = "live" if live else "forced"

    def add_rows(self, rows: Rows) -> None:
        """Take the rows ``[rows, L, K]`` of the last positions; those of positions that have some already stay."""
        if self._rows is not None:
            tokens = len(self.prompt_ids) + len(self.tokens)
            self._rows.append(rows[len(rows) - (tokens - self._rows_held) :])
            self._rows_held = tokens

    def add(self, draw: Draw, version: int) -> None:
        self.tokens.append(draw.token)
        self._versions.append(version)
        if self._log_probs is not None:
            self._log_probs.append(draw.log_prob)
        self._masks.append(draw.mask)
        # it ends with a stop token, or by its length; with a stop string below
        sampling, token = self.sampling, draw.token
        if not sampling.ignore_eos and token == self._tokenizer.eos:
            self.finish_reason = "stop"
        elif token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self._tokenizer.more_eos):
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
        new = len(self._masks)
        return KeptIds.join([had, KeptIds.of_masks(self._masks, new)], [len(self.tokens) - new, new])

    def _routes(self) -> NDArray[np.unsignedinteger] | None:
        """Return ``[P + G - 1, L, K]`` as engines give them: unsigned, zero where there is no router."""
        if not self._rows or self._layout is None:
            return None
        rows = np.concatenate(self._rows)[: len(self.ids) - 1]
        return np.maximum(rows, 0).astype(np.uint8 if self._layout.num_experts <= 256 else np.uint16)
