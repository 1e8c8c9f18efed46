"""Texts of single tokens: what would not be seen is shown."""

from __future__ import annotations

from typing import Any

from support.token_rollouts import TOKENIZER
from torchrl_moe.render.tokens import TokenTexts


def test_ascii_markers_and_line_breaks() -> None:
    texts = TokenTexts(TOKENIZER)
    assert texts.of([*b"a b", 10, 9, 13, 27, 258]) == ["a", " ", "b", "↵\n", "→\t", "␍", "\\x1b", "<|im_end|>"]
    assert texts.is_special(258) and not texts.is_special(97)


def test_a_character_of_several_tokens_stands_at_the_first() -> None:
    assert TokenTexts(TOKENIZER).of(list("é€𝄞x".encode())) == ["é", "·", "€", "·", "·", "𝄞", "·", "·", "·", "x"]


def test_half_a_character_has_the_tokenizers_name() -> None:
    assert TokenTexts(TOKENIZER).of([0xC3, 97]) == [TOKENIZER.convert_ids_to_tokens(0xC3), "a"]


def test_without_a_tokenizer_it_is_the_number() -> None:
    texts = TokenTexts(None)
    assert texts.of([5, 258]) == ["5 ", "258 "]
    assert not texts.is_special(258)


def test_an_id_outside_of_the_vocabulary_is_shown_as_such() -> None:
    class Strict:
        all_special_ids = ()

        def decode(self, ids: list[int], **_: Any) -> str:
            raise KeyError(ids[0])

        convert_ids_to_tokens = decode

    assert TokenTexts(Strict()).of([7]) == ["⟨7⟩"]
    assert TokenTexts(TOKENIZER).of([100_000]) == ["⟨100000⟩"]


def test_each_text_is_decoded_once() -> None:
    calls: list[list[int]] = []

    class Counting:
        def decode(self, ids: list[int], **_: Any) -> str:
            calls.append(ids)
            return "a"

    assert TokenTexts(Counting()).of([1, 2, 1, 1]) == ["a"] * 4
    assert calls == [[1], [2]]
