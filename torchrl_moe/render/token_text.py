"""The text of a single token, printable: line breaks, bytes and markers are seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TokenTexts"]

SEEN = {"\n": "↵\n", "\t": "→\t", "\r": "␍"}
"""What stands for a character that would not be seen; a line break breaks the line besides."""

MOST_PARTS = 4
"""Tokens that one character, at most four bytes, is made of."""
OUTSIDE = (IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What tokenizers raise at an id that is not in their vocabulary."""


class TokenTexts:
    """Texts of tokens, each decoded once.

    Args:
        tokenizer: with ``decode``, ``convert_ids_to_tokens`` and ``all_special_ids``; ``None``: a token is its number.

    >>> TokenTexts(None).of([12, 7])
    ['12 ', '7 ']
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._texts: dict[tuple[int, ...], str | None] = {}

    def is_special(self, token: int) -> bool:
        """Whether a token is a marker, such as the end of a turn."""
        return token in self._special

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return a text for each of some tokens that follow one another.

        Of a character that several tokens make up, the first has it, and the others are a ``·``.
        """
        texts: list[str] = []
        while len(texts) < len(tokens):
            at = len(texts)
            whole = next((n for n in range(1, MOST_PARTS + 1) if self._decoded(tuple(tokens[at : at + n]))), 1)
            text = self._decoded(tuple(tokens[at : at + whole]))
            texts += [self._name(tokens[at]) if text is None else "".join(map(_seen, text)), *["·"] * (whole - 1)]
        return texts[: len(tokens)]

    def _decoded(self, tokens: tuple[int, ...]) -> str | None:
        """Return the text of tokens that make whole characters, otherwise ``None``."""
        if tokens not in self._texts:
            self._texts[tokens] = self._decode(tokens)
        return self._texts[tokens]

    def _decode(self, tokens: tuple[int, ...]) -> str | None:
        if self._tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        try:
            text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        except OUTSIDE:
            return None
        return None if not text or "\ufffd" in text else text

    def _name(self, token: int) -> str:
        """Return what the tokenizer calls a token that is no character."""
        try:
            name = self._tokenizer.convert_ids_to_tokens(token)
        except OUTSIDE:
            name = None
        return f"⟨{token}⟩" if name is None else "".join(map(_seen, str(name)))


def _seen(char: str) -> str:
    return SEEN.get(char) or (char if char.isprintable() else char.encode("unicode_escape").decode("ascii"))
