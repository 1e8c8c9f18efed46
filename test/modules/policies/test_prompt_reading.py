"""Where prompts are read from: by mode, by key, by mask, and by template."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Masks, Text, Tokens

from support.prompt_sources import TOKENIZER, source_of
from torchrl_moe.testing import ByteTokenizer

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
    assert SOURCE.template() == TOKENIZER.chat_template
    assert replace(SOURCE, chat_template="mine").template() == "mine"
    assert "<tool_response>" in str(replace(SOURCE, chat_template_name="qwen").template())
    assert replace(SOURCE, chat_template="{{ messages[0].content }}!").prompts([chat()]).texts == ["hi!"]
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = {"default": "d", "tool_use": "t"}
    several = replace(SOURCE, tokenizer=tokenizer)
    assert (several.template(), several.template([{"name": "f"}])) == ("d", "t")
    own_way = SimpleNamespace(apply_chat_template=lambda messages, **_: messages[0]["content"])
    assert replace(SOURCE, tokenizer=own_way).template() is None


def test_no_template_is_ever_invented() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    tokenizer.name_or_path = "qwen"  # TorchRL would take its own of that family
    for one in (tokenizer, SimpleNamespace()):
        source = replace(SOURCE, tokenizer=one)
        with pytest.raises(ValueError, match=r"no chat template.*pass chat_template=.* or use input_mode='text'"):
            source.prompts([chat()])
    tokenizer.chat_template = {"rag": "r", "tool_use": "t"}
    with pytest.raises(ValueError, match="the chat templates rag, tool_use and no 'default': pass chat_template="):
        replace(SOURCE, tokenizer=tokenizer).prompts([chat()])
    with pytest.raises(ValueError, match="chat_template_name='mine' must be one of TorchRL's: chatml_format, "):
        replace(SOURCE, chat_template_name="mine").prompts([chat()])


SEEN = "{{ [messages[0].content, tools, thinking, style] | tojson }}"


def test_each_sample_may_change_what_the_template_gets() -> None:
    source = replace(SOURCE, chat_template=SEEN, chat_template_kwargs={"thinking": True, "style": "plain"})
    samples = [chat(), chat(), chat()]
    samples[1]["chat_template_kwargs"] = NonTensorData({"thinking": False})
    samples[1]["tools"] = NonTensorData([{"name": "f"}])
    samples[2]["tools"] = NonTensorData('[{"name": "g"}]')
    samples[2]["chat_template_kwargs"] = NonTensorData(None)
    assert [json.loads(text) for text in source.prompts(samples).texts] == [
        ["hi", None, True, "plain"],
        ["hi", [{"name": "f"}], False, "plain"],
        ["hi", [{"name": "g"}], True, "plain"],
    ]
    with set_list_to_stack(True):
        batch = TensorDict(history=ChatHistory(prompt=History.from_chats([CHAT] * 2)), batch_size=[2])
        batch["tools"] = [[{"name": "f"}], [{"name": "g"}, {"name": "h"}]]
        texts = source.prompts(list(batch.unbind(0))).texts
    assert [[tool["name"] for tool in json.loads(text)[1]] for text in texts] == [["f"], ["g", "h"]]


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("tools", "add(x)", r"tools must be a list of JSON schemas or functions, or its JSON text, got 'add\(x\)'"),
        ("tools", "3", "tools must be a list"),
        ("tools", [3], "tools must be a list"),
        ("chat_template_kwargs", [1], "chat_template_kwargs must be a mapping of names to values, got"),
        ("chat_template_kwargs", {1: 2}, "chat_template_kwargs must be a mapping"),
        ("chat_template_kwargs", {"tokenize": True}, "are a template's own arguments, .*; 'tokenize' is not one"),
    ],
)
def test_what_is_not_for_a_template_is_refused(entry: str, value: Any, message: str) -> None:
    sample = chat()
    sample[entry] = NonTensorData(value)
    with pytest.raises((TypeError, ValueError), match=message):
        SOURCE.prompts([sample])
