"""Full sequences of every kind, read and written; the wrapper over an engine is in ``test_engine_scorer.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import Text

from torchrl_moe.modules.policies.prompts import Source
from torchrl_moe.modules.policies.scoring_wrapper import (
    FullSequence,
    pad_scored,
    read_sequences,
    scored_tensordict,
)
from torchrl_moe.testing import ByteTokenizer

PAD, END = 256, 258
KEYS = {name: name for name in ("tokens", "masks", "log_probs", "text", "history")}


def source(mode: str, key: Any, **fields: Any) -> Source:
    given = {
        "input_mode": mode,
        "input_key": key,
        "tokenizer": ByteTokenizer(),
        "tokenizer_kwargs": {},
        "chat_template": None,
        "chat_template_name": None,
        "attention_mask_key": "attention_mask",
        "tokens_key": "tokens",
        "masks_key": "masks",
        "prefer_tokens": False,
        "pad": PAD,
    }
    return Source(**{**given, **fields})


def mask_of(ids: list[int], pad: int | None, end: int = END, **entries: Any) -> list[int]:
    sample = TensorDict(ids=torch.tensor(ids), **entries)
    tokenizer = ByteTokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    (one,) = read_sequences([sample], source("tokens", "ids", pad=pad, tokenizer=tokenizer))
    assert one.ids.tolist() == ids
    return one.mask.int().tolist()


@pytest.mark.parametrize(
    ("ids", "real"),
    [
        ([PAD, PAD, 1, 2], [0, 0, 1, 1]),
        ([1, PAD, 2, PAD, PAD], [1, 1, 1, 0, 0]),
        ([1, 2], [1, 1]),
        ([PAD, PAD], [0, 0]),
    ],
)
def test_without_a_mask_pads_are_at_the_ends(ids: list[int], real: list[int]) -> None:
    assert mask_of(ids, PAD) == real
    assert mask_of(ids, None) == [1] * len(ids)


def test_a_pad_that_ends_turns_is_real_once() -> None:
    assert mask_of([PAD, 1, 2, PAD, PAD], PAD, end=PAD) == [0, 1, 1, 1, 0]
    assert mask_of([PAD, 1, 2], PAD, end=PAD) == [0, 1, 1]


def test_a_mask_of_the_rollout_comes_before_one_of_the_input() -> None:
    masks = TensorDict(all_attention_mask=torch.tensor([0, 1, 1]))
    assert mask_of([1, 2, 3], PAD, masks=masks, attention_mask=torch.tensor([1])) == [0, 1, 1]
    assert mask_of([1, 2, 3], PAD, attention_mask=torch.tensor([1, 1, 0])) == [1, 1, 0]


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="Expected 'ids' key in sample 0"):
        read_sequences([TensorDict(other=torch.ones(1))], source("tokens", "ids"))
    with pytest.raises(TypeError, match="Expected History object"):
        read_sequences([TensorDict(h=TensorDict(a=torch.ones(2)))], source("history", "h"))


def test_text_and_chats_have_no_pads() -> None:
    (one,) = read_sequences([TensorDict(text=Text(full="ab"))], source("text", ("text", "full")))
    assert (one.ids.tolist(), one.mask.tolist(), one.text, one.assistant) == ([97, 98], [True, True], "ab", None)
    chat = History.from_chats([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]])[0]
    (one,) = read_sequences([TensorDict(h=chat)], source("history", "h"))
    assert one.text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert one.history.content == ["a", "b"]
    assert one.assistant is not None
    assert one.assistant.shape == one.ids.shape
    assert ord("b") in one.ids[one.assistant]
    assert ord("a") not in one.ids[one.assistant]


def test_what_is_written_of_a_sequence() -> None:
    ids, mask = torch.tensor([5, 6]), torch.tensor([True, True])
    td = scored_tensordict(FullSequence(ids, mask), torch.tensor([0.0, -1.0]), KEYS)
    assert set(td.keys()) == {"tokens", "masks", "log_probs"}
    assert td["log_probs", "full"].tolist() == [0.0, -1.0]
    assert td["tokens"].padded is False


def test_rows_are_padded_on_the_left() -> None:
    rows = [[5], [6, 7]]
    scored = [
        scored_tensordict(
            FullSequence(
                torch.tensor(row), torch.ones(len(row), dtype=torch.bool), torch.ones(len(row), dtype=torch.bool), "x"
            ),
            torch.full((len(row),), -1.0),
            KEYS,
        )
        for row in rows
    ]
    td = pad_scored(scored, 9, KEYS)
    assert td["tokens", "full"].tolist() == [[9, 5], [6, 7]]
    for leaf in ("all_attention_mask", "all_assistant_mask"):
        assert td["masks", leaf].tolist() == [[False, True], [True, True]]
    assert td["log_probs", "full"].tolist() == [[0.0, -1.0], [-1.0, -1.0]]
    assert [one["text"].full for one in td.unbind(0)] == ["x", "x"]
    assert (td["tokens"].padded, td.batch_size) == (True, torch.Size([2]))
