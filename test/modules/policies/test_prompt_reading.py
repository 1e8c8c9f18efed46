"""Where prompts are read from: by mode, by key, by mask, and by template."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Masks, Text, Tokens

from support.prompt_sources import TOKENIZER, source_of
from torchrl_moe.modules.policies.prompt_reading import require_history, require_key

SOURCE = source_of("history")
CHAT = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def chat() -> TensorDict:
    return TensorDict(history=ChatHistory(prompt=History.from_chats([CHAT])[0]))


def test_chats_text_and_tokens() -> None:
    found = SOURCE.prompts([chat()])
    assert (found.texts, found.ids) == ([RENDERED], [TOKENIZER.encode(RENDERED)])
    text = replace(SOURCE, input_mode="text", input_key=("text", "prompt"))
    assert text.prompts([TensorDict(text=Text(prompt="hi")), TensorDict(text=Text(prompt="x"))]).ids == [
        [104, 105],
        [120],
    ]
    tokens = replace(SOURCE, input_mode="tokens", input_key="ids")
    assert tokens.prompts([TensorDict(ids=torch.tensor([256, 5, 6]))]).ids == [[5, 6]]


def test_a_mask_of_tokens_is_used_if_it_is_of_the_prompt() -> None:
    tokens = replace(SOURCE, input_mode="tokens", input_key=("tokens", "prompt"))
    sample = TensorDict(tokens=Tokens(prompt=torch.tensor([7, 5, 6])))
    sample["attention_mask"] = torch.tensor([0, 1, 1])
    assert tokens.prompts([sample]).ids == [[5, 6]]
    sample["masks"] = Masks(all_attention_mask=torch.tensor([True, False, True]))
    assert tokens.prompts([sample]).ids == [[7, 6]]
    sample["masks"] = Masks(all_attention_mask=torch.ones(9).bool())  # of prompt and response, an earlier turn's
    assert tokens.prompts([sample]).ids == [[5, 6]]


def test_a_template_is_the_one_named_or_the_tokenizers_own() -> None:
    assert SOURCE.own_template == TOKENIZER.chat_template
    assert replace(SOURCE, chat_template="mine").own_template == "mine"
    assert replace(SOURCE, chat_template_name="qwen").own_template is None
    assert replace(SOURCE, tokenizer=SimpleNamespace()).own_template is None
    assert replace(SOURCE, chat_template="{{ messages[0].content }}!").prompts([chat()]).texts == ["hi!"]


def test_tokens_are_preferred_where_that_is_wanted() -> None:
    sample = chat()
    sample["tokens"] = Tokens(prompt=torch.tensor([1, 2]))
    assert replace(SOURCE, prefer_tokens=True).prompts([sample]).ids == [[1, 2]]
    assert SOURCE.prompts([sample]).ids == [TOKENIZER.encode(RENDERED)]


def test_what_is_missing_is_named() -> None:
    message = r"Expected \('history', 'prompt'\) key in sample 1, where input_mode='history' reads it.*'text'"
    with pytest.raises(ValueError, match=message):
        SOURCE.prompts([chat(), TensorDict(text=Text(prompt="hi"))])
    require_key([TensorDict(a=1)], "a", "text")


@pytest.mark.parametrize("given", ["hi", ["hi"], None])
def test_a_history_is_one_of_torchrls(given: Any) -> None:
    with pytest.raises(TypeError, match=rf"Expected History object .* at 'h', got {type(given).__name__}"):
        require_history(given, "h")
    history = lazy_stack([History.from_chats([CHAT])[0]])
    assert require_history(history, "h") is history
