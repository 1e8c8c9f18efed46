"""Text in and out of an engine: a model's tokenizer, and the text of an answer as its tokens come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

__all__ = ["TextStream", "Words"]

INVALID_PREFIX = "Invalid prefix encountered"  # the message of tokenizers for bytes that are no text


class Words:
    """A tokenizer that two threads use.

    Args:
        tokenizer: of transformers.
        generation_config: of the model; it may name more tokens that end an answer.

    Attributes:
        eos: the token that ends an answer; ``None`` if the tokenizer has none.
        more_eos: other tokens that do.

    Raises:
        ValueError: the tokenizer is not one of the ``tokenizers`` library.
    """

    def __init__(self, tokenizer: Any, generation_config: Any = None) -> None:
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        if self.backend is None:
            raise ValueError(f"engine='transformers' needs a fast tokenizer, got {type(tokenizer).__name__}")
        self.tokenizer = tokenizer
        self.eos: int | None = tokenizer.eos_token_id
        named = getattr(generation_config, "eos_token_id", None)
        listed = [named] if isinstance(named, int) else list(named or ())
        self.more_eos = frozenset(listed) - {self.eos}
        self._lock = threading.Lock()  # encoding text changes the tokenizer for a moment

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        with self._lock:
            ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> TextStream:
        """Return the text stream of an answer to a prompt."""
        return TextStream(self, prompt_ids, skip_special_tokens)

    def step(self, stream: Any, token: int) -> str | None:
        """Return what a token adds to a text; ``None`` for a part of a character."""
        with self._lock:
            text: str | None = stream.step(self.backend, token)
        return text


class TextStream:
    """The text of one answer, token by token; a character whose bytes are not all there yet is not shown."""

    def __init__(self, words: Words, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._words, self._skips = words, skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special_tokens)

    def step(self, token: int) -> str:
        """Return what a token adds."""
        try:
            return self._words.step(self._stream, token) or ""
        except Exception as error:  # the library has no error of its own
            if not str(error).startswith(INVALID_PREFIX):
                raise
        self._stream = DecodeStream(skip_special_tokens=self._skips)
        return self._words.step(self._stream, token) or ""
