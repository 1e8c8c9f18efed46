"""Where a wrapper's prompts come from: a chat history, text, or tokens. All end as token ids, without padding.

Only token ids go to the engine: a prompt tokenised twice, here and in the engine, may become two different sequences,
and routes belong to exactly one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NestedKey, NonTensorData, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text

from torchrl_moe._compat_transformers import chat_template_named

__all__ = [
    "Chat",
    "Prompts",
    "Source",
    "check_templates",
    "goes_on_from",
    "history_entry",
    "known_ids",
    "options_of",
    "plain_message",
    "prompts_from_chats",
    "prompts_from_text",
    "prompts_from_tokens",
    "reads_chats",
    "refuse_batching",
    "require_key",
    "template_of",
    "template_options",
    "text_entry",
]

IN_HISTORY = ("role", "content", "tool_calls")
"""Entries of a message that a ``History`` has fields for."""


@dataclass(slots=True)
class Prompts:
    """Prompts of a batch: ids without padding, and what they were made from, one entry per sample."""

    ids: list[list[int]]
    texts: list[str] = field(default_factory=list)
    chats: list[Chat] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Chat:
    """The prompt of one sample: messages as chat templates read them, and as a ``History`` ``[turns]``.

    ``answered`` is the text of the policy's own previous answer, which is complete if it ends the last message.
    """

    messages: list[dict[str, Any]]
    history: History
    answered: str | None = None

    @property
    def goes_on(self) -> bool:
        """Whether an answer continues the last message: the assistant's, given by the caller, without tool calls."""
        if not goes_on_from(self.messages[-1]):
            return False
        said, own = self.messages[-1]["content"], self.answered
        return own is None or (said != own if not own else not said.endswith(own))

    @classmethod
    def of(cls, given: Any, key: NestedKey = ("history", "prompt"), answered: str | None = None) -> Chat:
        """Read a ``History`` ``[turns]``, or a list of messages, mappings as those of OpenAI's API.

        Whatever a message has beside role and content (``name``, ``tool_call_id``, ``tool_calls``, ...) is for the
        template; a ``History`` has no field for all of it. ``key`` is where it was found.
        """
        given = given.data if isinstance(given, NonTensorData) else given
        if isinstance(given, History):
            spoken = [one for one in given.tolist(tolist_first=True) if one["role"] != "<none>"]
            messages = [plain_message({**one, "is_complete": None}) for one in spoken]
        elif isinstance(given, list | tuple) and all(isinstance(one, Mapping) for one in given):
            messages = [plain_message(one) for one in given]
        else:
            raise TypeError(
                f"Expected History object (torchrl.data.llm.History) [turns], or a list of messages, at {key!r}, got "
                f"{type(given).__name__}"
            )
        if not messages:
            raise ValueError(f"the chat at {key!r} has no message")
        known = [{name: one[name] for name in IN_HISTORY if name in one} for one in messages]
        history = given if isinstance(given, History) else History.from_chats([known])[0]
        return cls(messages, history, answered)

    def rendered(self, tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> str:
        """Return its text, with a generation prompt, or with the last message open if that is to be continued."""
        given = {} if template is None else {"chat_template": template}
        text: str = tokenizer.apply_chat_template(
            self.messages,
            tokenize=False,
            add_generation_prompt=not self.goes_on,
            continue_final_message=self.goes_on,
            **given,
            **options,
        )
        if not text:
            raise ValueError(f"the chat template makes no text of {self.messages!r:.100}: pass another chat_template=")
        return text


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it: without unset entries, its parts of text joined, calls' arguments decoded.

    >>> plain_message({"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None})
    {'role': 'user', 'content': 'hi'}
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"a chat is a list of messages, {{'role': text, 'content': text}}, got {message!r:.60}")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.setdefault("content", "" if plain.get("tool_calls") else None)
    parts = [content] if isinstance(content, Mapping) else content
    if isinstance(parts, list | tuple):
        texts = [one.get("text") if isinstance(one, Mapping) and one.get("type") == "text" else None for one in parts]
        content = None if None in texts else "".join(map(str, texts))
    if not isinstance(plain.get("role"), str) or not isinstance(content, str):
        raise ValueError(
            "a message is {'role': text, 'content': text, or parts of type 'text'}, and only tool calls need no "
            f"content; got {message!r:.100}"
        )
    plain["content"] = content
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_decoded(call) for call in plain["tool_calls"]]
    return plain


def _decoded(call: Any) -> Any:
    """Return a tool call with its arguments as a mapping, as templates write them; OpenAI's API has them as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:  # a model's own mistake is shown as it was made
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def goes_on_from(last: Mapping[str, Any]) -> bool:
    """Whether a last message can be continued: the assistant's, and not one that calls tools."""
    return last["role"] == "assistant" and isinstance(last.get("content"), str) and not last.get("tool_calls")


def prompts_from_chats(
    chats: Sequence[Chat],
    texts: Sequence[str],
    tokenizer: Any,
    known: Sequence[Mapping[str, list[int]]] | None = None,
) -> Prompts:
    """Encode rendered chats."""
    if known is None:
        # the template has already written the special tokens
        return Prompts(tokenizer(list(texts), add_special_tokens=False)["input_ids"], list(texts), list(chats))
    pairs = [_continued(text, ids, tokenizer) for text, ids in zip(texts, known, strict=True)]
    return Prompts([ids for ids, _ in pairs], [text for _, text in pairs], list(chats))


def _continued(text: str, known: Mapping[str, list[int]], tokenizer: Any) -> tuple[list[int], str]:
    """Return the ids of a rendered chat, and their text: known ids as far as they reach, then the encoded rest.

    Ids of an earlier turn contain neither what the template writes after an answer nor the next question.
    """
    for leaf in ("full", "prompt"):
        start = tokenizer.decode(known[leaf], skip_special_tokens=False) if known.get(leaf) else ""
        if start and text.startswith(start):
            return known[leaf] + tokenizer(text[len(start) :], add_special_tokens=False)["input_ids"], text
    ids = known.get("prompt") or known.get("full")
    if ids and not known.get("response"):  # the caller's own ids, however they were rendered
        return ids, tokenizer.decode(ids, skip_special_tokens=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"], text


def known_ids(sample: TensorDictBase, tokens_key: NestedKey, mask: Tensor | None, pad: int | None) -> dict[str, Any]:
    """Return the ids that ``sample`` holds at ``tokens_key``, by leaf, without padding."""
    tokens = sample.get(tokens_key, None)
    found = {}
    for leaf in ("prompt", "response", "full"):
        ids = None if tokens is None else tokens.get(leaf, None)
        if ids is not None:
            fits = leaf == "full" and mask is not None and mask.shape == ids.shape
            found[leaf] = ids[mask.bool()].tolist() if fits and mask is not None else _trimmed(ids, pad)
    return found


def prompts_from_text(texts: Any, tokenizer: Any, tokenizer_kwargs: Mapping[str, Any]) -> Prompts:
    """Encode text prompts: a string, a list of them, or a non-tensor stack. Padding is never added."""
    listed = [texts] if isinstance(texts, str) else list(texts if isinstance(texts, list) else texts.tolist())
    plain = {**tokenizer_kwargs, "padding": False, "return_tensors": None}
    return Prompts(tokenizer(listed, **plain)["input_ids"], listed)


def prompts_from_tokens(
    tensordict: TensorDictBase, key: NestedKey, mask_key: NestedKey | None, pad: int | None
) -> Prompts:
    """Read token prompts without their padding.

    If there is a mask, it decides. Otherwise padding is removed only at both ends: the pad token may be the end-of-turn
    token, which is real inside a prompt.
    """
    rows = list(tensordict.get(key, as_list=True))
    masks = tensordict.get(mask_key, None, as_list=True) if mask_key is not None else None
    if masks is None:
        return Prompts([_trimmed(row, pad) for row in rows])
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        if row.shape != mask.shape:
            raise ValueError(
                f"sample {i}: {mask_key!r} has shape {list(mask.shape)} and the prompt {list(row.shape)}: give a mask "
                "per token, or take the mask out"
            )
    return Prompts([row[mask.bool()].tolist() for row, mask in zip(rows, masks, strict=True)])


def _trimmed(row: Tensor, pad: int | None) -> list[int]:
    if pad is None:
        return list(row.tolist())
    (real,) = torch.where(row != pad)
    return list(row[real[0] : real[-1] + 1].tolist()) if len(real) else []


def text_entry(prompt: str, response: str) -> Text:
    """Return the ``Text`` of one answer."""
    return Text(prompt=prompt, response=response, full=prompt + response)


def history_entry(chat: Chat, content: str) -> ChatHistory:
    """Return the ``ChatHistory`` of one answer: prompt ``[turns]``, response ``[1]``, full ``[turns + 1]``.

    An answer that continues the last message is a part of it: then ``full`` is ``[turns]``.
    """
    response, prompt = History(role="assistant", content=content), chat.history
    if chat.goes_on:
        joined = History(role="assistant", content=chat.messages[-1]["content"] + content)
        full = lazy_stack([*list(prompt.unbind(0))[:-1], joined])
    else:
        full = prompt.append(response, inplace=False, dim=-1)
    return ChatHistory(prompt=prompt, response=lazy_stack([response]), full=full)


# The prompts of a batch, read from the keys that a wrapper's arguments name.


OPTIONS, TOOLS = "chat_template_kwargs", "tools"
"""Entries of a sample that are for its chat template."""
NOT_THE_TEMPLATES = (
    "conversation", "chat_template", "chat_template_name", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that are set here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where text comes from, and how it becomes tokens: a wrapper's arguments of these names."""

    input_mode: str
    input_key: NestedKey
    tokenizer: Any
    tokenizer_kwargs: dict[str, Any]
    chat_template: str | None
    chat_template_name: str | None
    attention_mask_key: NestedKey
    tokens_key: NestedKey
    masks_key: NestedKey
    prefer_tokens: bool
    pad: int | None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def template(self, tools: Any = None) -> str | None:
        """Return the chat template to render with, see :func:`template_of`."""
        return template_of(self.tokenizer, self.chat_template, self.chat_template_name, tools)

    def options(self, sample: TensorDictBase) -> dict[str, Any]:
        """Return the further arguments of the chat template for a sample, see :func:`options_of`."""
        return options_of(self.chat_template_kwargs, {key: _plain(sample.get(key, None)) for key in (OPTIONS, TOOLS)})

    def text_of(self, chat: Chat, sample: TensorDictBase) -> str:
        """Return the text that a sample's chat is rendered to, with a generation prompt."""
        options = self.options(sample)
        return chat.rendered(self.tokenizer, self.template(options.get("tools")), options)

    def prompts(self, samples: Sequence[TensorDictBase]) -> Prompts:
        """Read a prompt from each sample, batch size ``[]``."""
        require_key(samples, self.input_key, self.input_mode)
        stack = lazy_stack(list(samples))
        if self.input_mode == "tokens":
            return prompts_from_tokens(stack, self.input_key, self._mask_key(samples), self.pad)
        if self.input_mode == "text":
            return prompts_from_text(stack.get(self.input_key), self.tokenizer, self.tokenizer_kwargs)
        known = None
        if self.prefer_tokens:
            mask = (self.masks_key, "all_attention_mask")
            known = [known_ids(one, self.tokens_key, one.get(mask, None), self.pad) for one in samples]
        chats = [Chat.of(one.get(self.input_key), self.input_key, self._answered(one)) for one in samples]
        texts = [self.text_of(chat, sample) for chat, sample in zip(chats, samples, strict=True)]
        return prompts_from_chats(chats, texts, self.tokenizer, known)

    def _answered(self, sample: TensorDictBase) -> str | None:
        """Return the text of a previous turn's answer, if the sample has its tokens: without the end of the turn."""
        ids = known_ids(sample, self.tokens_key, None, self.pad).get("response")
        if ids is None:
            return None
        end = getattr(self.tokenizer, "eos_token_id", None)
        text: str = self.tokenizer.decode(ids[:-1] if ids and ids[-1] == end else ids, skip_special_tokens=False)
        return text

    def _mask_key(self, samples: Sequence[TensorDictBase]) -> NestedKey:
        """Return the key of the prompts' mask: after an earlier turn, ``"masks"`` cover more than the prompt."""
        key = (self.masks_key, "all_attention_mask")
        masks = [sample.get(key, None) for sample in samples]
        shapes = [sample.get(self.input_key).shape for sample in samples]
        fits = all(mask is not None and mask.shape == shape for mask, shape in zip(masks, shapes, strict=True))
        return key if fits else self.attention_mask_key


def require_key(samples: Sequence[TensorDictBase], key: NestedKey, input_mode: str) -> None:
    """Raise ValueError unless every sample has ``key``."""
    for i, sample in enumerate(samples):
        if sample.get(key, None) is None:
            raise ValueError(
                f"Expected {key!r} key in sample {i}, where input_mode={input_mode!r} reads it; the sample has "
                f"{sorted(map(str, sample.keys(True)))}"
            )


def refuse_batching(arguments: Mapping[str, Any], instead: str) -> None:
    """Refuse what joins calls of several threads in TorchRL's wrappers."""
    for name in ("batching", "min_batch_size", "max_batch_size"):
        if arguments[name] not in (None, False):
            raise ValueError(f"{name} must be None, got {arguments[name]!r}: calls are not joined here; {instead}")


def check_templates(arguments: Mapping[str, Any]) -> None:
    """Refuse a wrapper's ``chat_template_kwargs`` and ``chat_template_name``, before a model is loaded."""
    template_options(arguments.get(OPTIONS))
    if arguments.get("chat_template_name") is not None:
        chat_template_named(arguments["chat_template_name"])


def reads_chats(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template, or its own way to render a chat."""
    if hasattr(tokenizer, "chat_template"):
        return tokenizer.chat_template is not None
    return hasattr(tokenizer, "apply_chat_template")


def template_of(
    tokenizer: Any, chat_template: str | None = None, chat_template_name: str | None = None, tools: Any = None
) -> str | None:
    """Return the chat template to render with; ``None``: the tokenizer has its own way.

    The given one comes first, then the named one, then the tokenizer's. If that has several, ``"default"`` is used, or
    ``"tool_use"`` with tools. TorchRL's guess, by the path that the tokenizer was loaded from, is never used: the model
    may never have seen its markers.
    """
    if chat_template is not None:
        return chat_template
    if chat_template_name is not None:
        return chat_template_named(chat_template_name)
    if not reads_chats(tokenizer):
        raise ValueError(
            "the tokenizer has no chat template, so a chat cannot be rendered: pass chat_template= (or "
            "chat_template_name=, one of TorchRL's), set tokenizer.chat_template, or use input_mode='text', which "
            "sends text as it is"
        )
    own = getattr(tokenizer, "chat_template", None)
    if not isinstance(own, dict):
        return own
    template: str | None = own.get("tool_use" if tools and "tool_use" in own else "default")
    if template is None:
        raise ValueError(
            f"the tokenizer has the chat templates {', '.join(sorted(own))} and no 'default': pass chat_template= "
            "one of these names"
        )
    return template


def options_of(common: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the further arguments of the chat template for a row: the common ones, changed by those in the row."""
    options, tools = {**common, **template_options(row.get(OPTIONS))}, tool_list(row.get(TOOLS))
    return {**options, TOOLS: tools} if tools else options


def template_options(given: Any) -> dict[str, Any]:
    """Return ``chat_template_kwargs``, checked; ``None`` is none."""
    if not isinstance(given, Mapping | None) or not all(isinstance(name, str) for name in given or ()):
        raise TypeError(f"{OPTIONS} must be a mapping of names to values, got {given!r:.100}")
    if taken := sorted(set(given or ()) & set(NOT_THE_TEMPLATES)):
        raise ValueError(f"{OPTIONS} are a template's own arguments, such as enable_thinking; {taken[0]!r} is not one")
    return dict(given or {})


def tool_list(given: Any) -> list[Any] | None:
    """Return a sample's ``tools``: JSON schemas or functions, or the same schemas as JSON text; ``None`` is none."""
    tools = given
    if isinstance(given, str):
        try:
            tools = json.loads(given)
        except json.JSONDecodeError:
            tools = 0
    if tools is not None and not (
        isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) or callable(tool) for tool in tools)
    ):
        raise TypeError(f"tools must be a list of JSON schemas or functions, or its JSON text, got {given!r:.100}")
    return None if tools is None else list(tools)


def _plain(value: Any) -> Any:
    """Return an entry of one sample as plain Python."""
    return value.data if isinstance(value, NonTensorData) else value.tolist() if hasattr(value, "tolist") else value
