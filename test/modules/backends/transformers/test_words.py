"""Text in and out: a tokenizer's ids, the text of an answer token by token, and which tokens end one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchrl_moe.modules.backends.transformers.answer import Words
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def test_text_becomes_ids_and_ids_become_text() -> None:
    words = Words(TOKENIZER)
    assert words.encode("Hi") == [72, 105]
    stream = words.stream([72, 105], True)
    assert [stream.step(token) for token in (33, 0xC3, 0xA9, 65)] == ["!", "", "é", "A"]  # é has two bytes
    assert stream.step(TOKENIZER.eos_token_id) == ""
    assert stream.step(5000) == ""  # a model may have more words than its tokenizer
    assert words.stream([5000, 72], True).step(65) == "A"
    shown = words.stream([], False)
    assert shown.step(TOKENIZER.eos_token_id) == TOKENIZER.eos_token


def test_bytes_that_are_no_text_do_not_end_it() -> None:
    stream = Words(TOKENIZER).stream([], True)
    assert "".join(stream.step(token) for token in (0xFF, 0xFE, 65, 0xFF, 66)).replace("\ufffd", "") == "AB"


@pytest.mark.parametrize(("named", "more"), [(None, set()), (7, {7}), ([TOKENIZER.eos_token_id, 7, 9], {7, 9})])
def test_the_models_own_configuration_may_name_more_tokens_that_end(named: object, more: set[int]) -> None:
    words = Words(TOKENIZER, SimpleNamespace(eos_token_id=named))
    assert words.eos == TOKENIZER.eos_token_id
    assert words.more_eos == more


def test_a_tokenizer_without_the_library_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a fast tokenizer, got SimpleNamespace"):
        Words(SimpleNamespace(eos_token_id=None))
