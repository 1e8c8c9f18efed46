"""Full sequences of every kind, read and written; the wrapper over an engine is in ``test_engine_scorer.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from torchrl_moe.modules.policies.prompts import Source
from torchrl_moe.modules.policies.scoring_wrapper import (
    read_sequences,
)
from torchrl_moe.testing import ByteTokenizer

PAD, END = 256, 258


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
