"""A tokenizer that was sent as files tokenizes as it did, and no file is written where it should not be."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from torchrl_moe.modules.backends.checkpoint import load_tokenizer, tokenizer_files
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.testing import ByteTokenizer


def test_a_tokenizer_that_was_sent_does_what_it_did() -> None:
    head, *buffers = wire.encode(tokenizer_files(ByteTokenizer(), trust_remote_code=False))
    there = load_tokenizer(wire.decode(head, buffers))
    here = ByteTokenizer()
    text = "é <|im_end|>"
    assert there.encode(text) == here.encode(text) == [195, 169, 32, 258]
    assert there.decode(there.encode(text)) == text
    chat = [{"role": "user", "content": "hi"}]
    assert there.apply_chat_template(chat, tokenize=False) == here.apply_chat_template(chat, tokenize=False)
    assert (there.eos_token_id, there.pad_token_id) == (here.eos_token_id, here.pad_token_id)


def test_nothing_of_it_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load_tokenizer(tokenizer_files(ByteTokenizer(), trust_remote_code=False))
    assert list(tmp_path.iterdir()) == []


def test_one_that_cannot_be_saved_is_refused_by_its_class() -> None:
    with pytest.raises(ValueError, match=r"cannot be saved, so it cannot be sent: builtins\.object"):
        tokenizer_files(object(), trust_remote_code=False)


@pytest.mark.parametrize("name", ["../outside.json", "/etc/outside.json", "a/../../outside.json"])
def test_a_file_outside_of_its_folder_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="a tokenizer has no file"):
        load_tokenizer({"files": {name: b"{}"}, "trust_remote_code": False})
    assert list(tmp_path.rglob("outside.json")) == []
