"""Prompts of every kind become the ids that a reader would expect, and padding never reaches them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Tokens

from support.prompt_sources import TOKENIZER, source_of
from torchrl_moe.modules.policies.prompts import (
    Chat,
    history_entry,
    plain_message,
    prompts_from_chats,
    prompts_from_text,
    prompts_from_tokens,
)
from torchrl_moe.testing import ByteTokenizer

PAD, START = 256, 257


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def histories(*chats: list[dict[str, Any]]) -> History:
    return History.from_chats(list(chats))


def text_of(given: Any, template: str = TOKENIZER.chat_template, **options: Any) -> str:
    return Chat.of(given).rendered(TOKENIZER, template, options)


EVERYTHING = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ [tools, thinking] | tojson }}"
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"x": 1}'}}


def test_a_template_sees_all_that_a_message_has() -> None:
    """As transformers and vLLM pass it: unset entries left out, text in one piece, arguments of calls as a mapping."""
    parts, answer = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}], {"role": "tool", "content": "2"}
    answer |= {"name": "add", "tool_call_id": "c1"}
    messages = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        answer,
    ]
    lines = text_of(messages, EVERYTHING, tools=[{"name": "add"}], thinking=False).splitlines()
    call = {**CALL, "function": {"name": "add", "arguments": {"x": 1}}}
    assert [json.loads(line) for line in lines] == [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        answer,
        [[{"name": "add"}], False],
    ]
    assert Chat.of(messages).history.content == ["1+1", "", "2"]
    wrong = {**CALL, "function": {"name": "add", "arguments": "{x"}}  # as the model wrote it
    assert plain_message({"role": "assistant", "tool_calls": [wrong]})["tool_calls"] == [wrong]


NO_MESSAGE = r"a message is {'role': text, 'content': text, or parts of type 'text'}"
NO_CHAT = r"Expected History object .* list of messages, at \('history', 'prompt'\)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"content": "a"}], NO_MESSAGE),
        ([{"role": 3, "content": "a"}], NO_MESSAGE),
        ([{"role": "user"}], NO_MESSAGE),
        ([{"role": "user", "content": [{"type": "image", "url": "a.png"}]}], NO_MESSAGE),
        ([{"role": "user", "content": [{"type": "text"}]}], NO_MESSAGE),
        ([], r"the chat at \('history', 'prompt'\) has no message"),
        (histories([{"role": "<none>", "content": ""}])[0], "has no message"),
        *((given, NO_CHAT) for given in (["hi"], "hi", 3, None, [1, 2])),
    ],
)
def test_what_is_no_chat_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError if message is NO_CHAT else ValueError, match=message):
        Chat.of(given)


@pytest.mark.parametrize(("said", "full"), [("Let me", ["2+2", "Let me see"]), ("", ["2+2", " see"])])
@pytest.mark.parametrize("kind", [list, lambda messages: histories(messages)[0]])
def test_a_last_message_of_the_assistant_is_continued(kind: Any, said: str, full: list[str]) -> None:
    """As transformers' pipeline and TRL do."""
    given = kind(chat("2+2", said))
    assert text_of(given) == f"<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n{said}"
    entry = history_entry(Chat.of(given), " see")
    assert (entry.full.content, entry.response.content) == (full, [" see"])
    assert entry.full.role == ["user", "assistant"]


@pytest.mark.parametrize(
    ("said", "answered", "goes_on"),
    [("yes", "yes", False), ("Let me", " me", False), ("", "", False), ("yes", "no", True), ("yes", "", True)],
)
def test_an_answer_of_the_policys_own_is_complete(said: str, answered: str, goes_on: bool) -> None:
    """As in TorchRL's environments, whose next prompt ends with it."""
    one = Chat.of(chat("q", said), answered=answered)
    assert one.goes_on == goes_on
    assert one.rendered(TOKENIZER, TOKENIZER.chat_template, {}).endswith(said if goes_on else "<|im_start|>assistant\n")


def test_a_call_of_a_tool_is_not_continued() -> None:
    called = [*chat("2+2"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert text_of(called).endswith("<|im_start|>assistant\n")
    assert history_entry(Chat.of(called), "4").full.content == ["2+2", "", "4"]


def known(rendered: str, **leaves: Any) -> tuple[list[int], str]:
    """Ids and text of a chat that renders to ``rendered``, given what is known of it."""
    prompts = prompts_from_chats([Chat.of(chat(rendered))], [rendered], TOKENIZER, [leaves])
    return prompts.ids[0], prompts.texts[0]


@pytest.mark.parametrize(
    ("rendered", "leaves", "ids", "text"),
    [
        ("abc", {"prompt": [97, 98, 99]}, [97, 98, 99], "abc"),  # of the whole text
        # of an earlier turn: its answer was a byte that is no UTF-8, which its text, encoded again, is not
        ("a\ufffd!", {"prompt": [97], "response": [200], "full": [97, 200]}, [97, 200, 33], "a\ufffd!"),
        ("xyz", {"prompt": [97], "response": [98], "full": [97, 98]}, [120, 121, 122], "xyz"),  # of another text
        ("xyz", {"prompt": [97, START]}, [97, START], "a<|im_start|>"),  # the caller's own
        ("xyz", {"full": [98]}, [98], "b"),
        ("ab", {}, [97, 98], "ab"),  # none
    ],
)
def test_known_ids_are_kept_and_the_rest_is_encoded(rendered: str, leaves: Any, ids: list[int], text: str) -> None:
    assert known(rendered, **leaves) == (ids, text)


with set_list_to_stack(True):
    STACK = TensorDict(text=["b", "aé"], batch_size=[2]).get("text")


@pytest.mark.parametrize(
    ("texts", "arguments", "ids"),
    [
        ("hi", {}, [[104, 105]]),
        (None, {}, [[98], [97, 195, 169]]),
        (["a", "bcd"], {"padding": "max_length", "max_length": 8}, [[97], [98, 99, 100]]),  # never padded
        (["abc"], {"truncation": True, "max_length": 2}, [[97, 98]]),
        (["<|im_end|>"], {"split_special_tokens": True}, [list(b"<|im_end|>")]),
    ],
)
def test_texts_are_encoded(texts: Any, arguments: dict[str, Any], ids: list[list[int]]) -> None:
    prompts = prompts_from_text(STACK if texts is None else texts, TOKENIZER, arguments)
    assert (prompts.ids, prompts.texts) == (ids, ["hi"] if texts == "hi" else texts or ["b", "aé"])


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_padding_and_reading_back_gives_the_same_prompts(rows: list[list[int]], left: bool) -> None:
    width = max(map(len, rows))
    pads = [[PAD] * (width - len(row)) for row in rows]
    padded = [pad + row if left else row + pad for pad, row in zip(pads, rows, strict=True)]
    td = TensorDict(tokens=Tokens(prompt=torch.tensor(padded), batch_size=[len(rows)]), batch_size=[len(rows)])
    for pad, wanted in ((PAD, rows), (None, padded)):
        assert prompts_from_tokens(td.to_lazystack(0), ("tokens", "prompt"), None, pad).ids == wanted


# where prompts are read from: by mode, by key, by mask, and by template


SOURCE = source_of("history")
CHAT = chat("hi")


def asked() -> TensorDict:
    return TensorDict(history=ChatHistory(prompt=History.from_chats([CHAT])[0]))


def test_a_template_is_the_one_named_or_the_tokenizers_own() -> None:
    own_way = SimpleNamespace(apply_chat_template=lambda messages, **_: messages[0]["content"])
    several = ByteTokenizer()
    several.chat_template = {"default": "{{ 'd' }}", "tool_use": "{{ 't' }}"}
    tools = asked().set("tools", NonTensorData([{"name": "f"}]))
    for attributes, sample, text in (
        ({}, asked(), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ({"chat_template": "{{ messages[0].content }}!"}, asked(), "hi!"),
        ({"tokenizer": several}, asked(), "d"),
        ({"tokenizer": several}, tools, "t"),
    ):
        assert source_of("history", **attributes)._prompts([sample]).texts == [text]
    assert "<tool_response>" in str(source_of("history", chat_template_name="qwen")._template())
    assert source_of("history", tokenizer=own_way)._template() is None


def test_no_template_is_ever_invented() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    tokenizer.name_or_path = "qwen"  # TorchRL would take its own of that family
    for one in (tokenizer, SimpleNamespace()):
        source = source_of("history", tokenizer=one)
        with pytest.raises(ValueError, match=r"no chat template.*pass chat_template=.* or use input_mode='text'"):
            source._prompts([asked()])
    tokenizer.chat_template = {"rag": "r", "tool_use": "t"}
    with pytest.raises(ValueError, match="the chat templates rag, tool_use and no 'default': pass chat_template="):
        source_of("history", tokenizer=tokenizer)._prompts([asked()])
    with pytest.raises(ValueError, match="chat_template_name='mine' must be one of TorchRL's: chatml_format, "):
        source_of("history", chat_template_name="mine")._prompts([asked()])


SEEN = "{{ [messages[0].content, tools, thinking, style] | tojson }}"


def test_each_sample_may_change_what_the_template_gets() -> None:
    source = source_of("history", chat_template=SEEN, chat_template_kwargs={"thinking": True, "style": "plain"})
    samples = [asked(), asked(), asked()]
    samples[1]["chat_template_kwargs"] = NonTensorData({"thinking": False})
    samples[1]["tools"] = NonTensorData([{"name": "f"}])
    samples[2]["tools"] = NonTensorData('[{"name": "g"}]')
    samples[2]["chat_template_kwargs"] = NonTensorData(None)
    assert [json.loads(text) for text in source._prompts(samples).texts] == [
        ["hi", None, True, "plain"],
        ["hi", [{"name": "f"}], False, "plain"],
        ["hi", [{"name": "g"}], True, "plain"],
    ]
    with set_list_to_stack(True):
        batch = TensorDict(history=ChatHistory(prompt=History.from_chats([CHAT] * 2)), batch_size=[2])
        batch["tools"] = [[{"name": "f"}], [{"name": "g"}, {"name": "h"}]]
        texts = source._prompts(list(batch.unbind(0))).texts
    assert [[tool["name"] for tool in json.loads(text)[1]] for text in texts] == [["f"], ["g", "h"]]


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("tools", "add(x)", r"tools must be a list of JSON schemas or functions, or its JSON text, got 'add\(x\)'"),
        ("tools", [3], "tools must be a list"),
        ("chat_template_kwargs", [1], "chat_template_kwargs must be a mapping of names to values, got"),
        ("chat_template_kwargs", {"tokenize": True}, "are a template's own arguments, .*; 'tokenize' is not one"),
    ],
)
def test_what_is_not_for_a_template_is_refused(entry: str, value: Any, message: str) -> None:
    sample = asked()
    sample[entry] = NonTensorData(value)
    with pytest.raises((TypeError, ValueError), match=message):
        SOURCE._prompts([sample])
