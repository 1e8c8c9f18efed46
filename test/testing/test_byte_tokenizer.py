"""ByteTokenizer: ids are bytes, any text survives, TorchRL reads chat turns back, a saved folder stands alone."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, set_list_to_stack
from tokenizers.decoders import DecodeStream
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from torchrl_moe.testing.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, ByteTokenizer

TEXTS = ["", "Hi", " two  spaces , don 't \n\n", "né 😀 日本 \u200d\U0010ffff", "\x00\x7f\x85Āġ"]
TEXTS += ["a<|im_start|>b<|im_end|>\n<|endoftext|>"]
TURNS = [("system", "Add."), ("user", " 1+1 "), ("assistant", "né😀"), ("user", "2+2"), ("assistant", "4")]
CHAT = [{"role": role, "content": text} for role, text in TURNS]
CHAT_TEXT = (
    "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n 1+1 <|im_end|>\n<|im_start|>assistant\nné😀<|im_end|>\n"
    "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return ByteTokenizer()


def test_ids_of_text_are_its_bytes_and_specials_come_after_them(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 259
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [256, 257, 258]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [257, 97, 258]
    assert tokenizer.encode("Ab é") == [65, 98, 32, 0xC3, 0xA9]
    assert [len(tokenizer.encode(bytes([b]).decode("latin1"))) for b in (0, 127, 128, 255)] == [1, 1, 2, 2]


@settings(max_examples=200)
@given(st.lists(st.one_of(st.text(), st.sampled_from(SPECIAL_TOKENS))).map("".join))
def test_any_unicode_round_trips(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_markers_as_plain_bytes_or_skipped_broken_utf8_and_pads(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("<|im_end|>", split_special_tokens=True) == list(b"<|im_end|>")
    assert tokenizer.decode([257, 104, 105, 258, 256], skip_special_tokens=True) == "hi"
    assert tokenizer.decode([104, 0xC3]) == "h\ufffd"
    batch = tokenizer(["a", "bcd"], padding=True, return_tensors="pt")  # on the left
    assert batch["input_ids"].tolist() == [[256, 256, 97], [98, 99, 100]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]


def test_chat_template_renders_chatml(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == CHAT_TEXT
    opened = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert opened == CHAT_TEXT[: CHAT_TEXT.index("né😀")]
    chat = [{"role": "assistant", "content": None}]  # an empty turn
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>assistant\n<|im_end|>\n"
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer.backend_tokenizer, id_) for id_ in tokenizer.encode(CHAT_TEXT)]
    assert "".join(piece or "" for piece in pieces) == CHAT_TEXT


def test_torchrl_reads_the_turns_back(tokenizer: PreTrainedTokenizerFast) -> None:
    with set_list_to_stack(True):
        history = History.from_text(CHAT_TEXT + "<|im_start|>assistant\ncut", tokenizer=tokenizer)
        assert history.role == ["system", "user", "assistant", "user", "assistant", "assistant"]
        assert history.content == ["Add.", "1+1", "né😀", "2+2", "4", "cut"]  # TorchRL strips blanks
        assert history.is_complete == [True] * 5 + [False]
        assert History.from_text(CHAT_TEXT, chat_template_name="qwen").content == history.content[:5]


def test_torchrl_renders_and_masks_with_our_template(tokenizer: PreTrainedTokenizerFast) -> None:
    how = {"tokenizer": tokenizer, "add_generation_prompt": False}
    with set_list_to_stack(True):
        history = History.from_chats([CHAT])
        assert history.apply_chat_template(**how) == [CHAT_TEXT]
        tokens = history.apply_chat_template(**how, return_dict=True, return_assistant_tokens_mask=True)
        env = ChatEnv(batch_size=(1,), tokenizer=tokenizer, input_mode="tokens")
        td = env.reset(TensorDict({"query": ["1+1"]}, batch_size=(1,)))
    assert tokens["input_ids"][0].tolist() == tokenizer.encode(CHAT_TEXT)
    sampled = tokens["input_ids"][0][tokens["assistant_masks"][0].bool()]
    assert sampled.tolist() == [*"né😀".encode(), 258, ord("4"), 258]
    expected = tokenizer.encode("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
    assert torch.as_tensor(td["tokens", "prompt"][0]).tolist() == expected


def test_a_pickle_and_a_saved_folder_load_without_torchrl_moe(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.encode(CHAT_TEXT), copy.chat_template) == (tokenizer.encode(CHAT_TEXT), CHAT_TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert loaded.apply_chat_template(CHAT, tokenize=False) == CHAT_TEXT
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (256, 257, 258)
    assert loaded.padding_side == "left"
    assert [loaded.decode(loaded.encode(text)) for text in TEXTS] == TEXTS
    texts = [path.read_bytes() for path in tmp_path.iterdir()]
    assert not any(b"torchrl_moe" in text for text in [*texts, pickle.dumps(tokenizer)])
