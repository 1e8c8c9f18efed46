"""Where a wrapper's prompts come from: a chat history, text, or tokens. All end as token ids, without padding.

Only token ids go to the engine: a prompt tokenised twice, here and in the engine, may become two different sequences,
and routes belong to exactly one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, NonTensorData, NonTensorStack, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LLMWrapperBase, Text

from torchrl_moe._checks import check_bool
from torchrl_moe._compat_transformers import chat_template_named
from torchrl_moe.modules.policies.rollout import RolloutKeys, pad_answers, stack_answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    def of(cls, given: object, key: NestedKey = ("history", "prompt"), answered: str | None = None) -> Chat:
        """Read a ``History`` ``[turns]``, or a list of messages, mappings as those of OpenAI's API.

        Whatever a message has beside role and content (``name``, ``tool_call_id``, ``tool_calls``, ...) is for the
        template; a ``History`` has no field for all of it. ``key`` is where it was found.
        """
        given = given.data if isinstance(given, NonTensorData) else given
        if isinstance(given, History):
            spoken = [one for one in given.tolist(tolist_first=True) if one["role"] != "<none>"]
            # is_complete is a History's own field, which no template reads
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
        # a History has no field for the rest, which only the template needs
        known = [{name: one[name] for name in IN_HISTORY if name in one} for one in messages]
        history = given if isinstance(given, History) else History.from_chats([known])[0]
        return cls(messages, history, answered)

    def rendered(self, tokenizer: PreTrainedTokenizerBase, template: str | None, options: Mapping[str, object]) -> str:
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
    # an unset entry must not be there: templates ask whether it is defined
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
        calls = []
        for call in plain["tool_calls"]:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
                # a model's own mistake is shown as it was made
                with suppress(json.JSONDecodeError):
                    call = {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
            calls.append(call)
        plain["tool_calls"] = calls
    return plain


def goes_on_from(last: Mapping[str, object]) -> bool:
    """Whether a last message can be continued: the assistant's, and not one that calls tools."""
    return last["role"] == "assistant" and isinstance(last.get("content"), str) and not last.get("tool_calls")


def prompts_from_chats(
    chats: Sequence[Chat],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    known: Sequence[Mapping[str, list[int]]] | None = None,
) -> Prompts:
    """Encode rendered chats."""
    if known is None:
        # the template has already written the special tokens
        return Prompts(tokenizer(list(texts), add_special_tokens=False)["input_ids"], list(texts), list(chats))
    # ids that are known are not encoded again: that may give others
    pairs = [_continued(text, ids, tokenizer) for text, ids in zip(texts, known, strict=True)]
    return Prompts([ids for ids, _ in pairs], [text for _, text in pairs], list(chats))


def _continued(text: str, known: Mapping[str, list[int]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str]:
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


def known_ids(
    sample: TensorDictBase, tokens_key: NestedKey, mask: Tensor | None, pad: int | None
) -> dict[str, list[int]]:
    """Return the ids that ``sample`` holds at ``tokens_key``, by leaf, without padding."""
    tokens = sample.get(tokens_key, None)
    found = {}
    for leaf in ("prompt", "response", "full"):
        ids = None if tokens is None else tokens.get(leaf, None)
        if ids is not None:
            fits = leaf == "full" and mask is not None and mask.shape == ids.shape
            found[leaf] = ids[mask.bool()].tolist() if fits and mask is not None else _trimmed(ids, pad)
    return found


def prompts_from_text(
    texts: str | list[str] | NonTensorStack, tokenizer: PreTrainedTokenizerBase, tokenizer_kwargs: Mapping[str, object]
) -> Prompts:
    """Encode text prompts: a string, a list of them, or a non-tensor stack. Padding is never added."""
    listed = [texts] if isinstance(texts, str) else list(texts if isinstance(texts, list) else texts.tolist())
    # padding would be tokens of the prompt to the engine
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


# The further arguments of a chat template, of a wrapper and of a row, and the template itself.


OPTIONS, TOOLS = "chat_template_kwargs", "tools"
"""Entries of a sample that are for its chat template."""
NOT_THE_TEMPLATES = (
    "conversation", "chat_template", "chat_template_name", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that are set here."""


def require_key(samples: Sequence[TensorDictBase], key: NestedKey, input_mode: str) -> None:
    """Raise ValueError unless every sample has ``key``."""
    for i, sample in enumerate(samples):
        if sample.get(key, None) is None:
            raise ValueError(
                f"Expected {key!r} key in sample {i}, where input_mode={input_mode!r} reads it; the sample has "
                f"{sorted(map(str, sample.keys(True)))}"
            )


def reads_chats(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has a chat template, or its own way to render a chat."""
    if hasattr(tokenizer, "chat_template"):
        return tokenizer.chat_template is not None
    return hasattr(tokenizer, "apply_chat_template")


def template_of(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
    chat_template_name: str | None = None,
    tools: object = None,
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
    # a tokenizer may have one template, several by name, or its own way to render
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


def options_of(common: Mapping[str, object], row: Mapping[str, object]) -> dict[str, object]:
    """Return the further arguments of the chat template for a row: the common ones, changed by those in the row."""
    options, given = {**common, **template_options(row.get(OPTIONS))}, row.get(TOOLS)
    tools = given  # JSON schemas or functions, or the same schemas as JSON text
    if isinstance(given, str):
        try:
            tools = json.loads(given)
        except json.JSONDecodeError:
            tools = 0  # which is refused below
    if tools is None:
        return options
    if not isinstance(tools, list | tuple) or not all(isinstance(one, Mapping) or callable(one) for one in tools):
        raise TypeError(f"tools must be a list of JSON schemas or functions, or its JSON text, got {given!r:.100}")
    return {**options, TOOLS: list(tools)} if tools else options


def template_options(given: object) -> dict[str, object]:
    """Return ``chat_template_kwargs``, checked; ``None`` is none."""
    if not isinstance(given, Mapping | None) or not all(isinstance(name, str) for name in given or ()):
        raise TypeError(f"{OPTIONS} must be a mapping of names to values, got {given!r:.100}")
    if taken := sorted(set(given or ()) & set(NOT_THE_TEMPLATES)):
        raise ValueError(f"{OPTIONS} are a template's own arguments, such as enable_thinking; {taken[0]!r} is not one")
    return dict(given or {})


# What both wrappers are made of: their common arguments, and what TorchRL's code reads of them besides ``forward``.


INPUT_MODES = ("history", "text", "tokens")


GENERATES = "this wrapper generates: get_new_version(generate=False) is one that scores"


def no_distribution(message: str) -> NotImplementedError:
    """Return the error that TorchRL's wrappers raise where they have no distributions, such as where they generate."""
    return NotImplementedError(message)


@dataclass(frozen=True, kw_only=True)
class WrapperOptions:
    """The arguments that both wrappers have, as they were given; the wrappers' docstrings explain them."""

    tokenizer: PreTrainedTokenizerBase | str | None
    input_mode: Literal["history", "text", "tokens"] | None
    input_key: NestedKey | None
    attention_mask_key: NestedKey
    generate: bool | None
    generate_kwargs: dict[str, object] | None
    tokenizer_kwargs: dict[str, object] | None
    pad_output: bool
    pad_model_input: bool | int | None
    inplace: Literal["empty"] | bool | None
    device: torch.device | str | None
    layout: torch.layout | None
    num_samples: int | None
    chat_template_name: str | None
    chat_template: str | None
    chat_template_kwargs: dict[str, object] | None
    return_log_probs: bool | None
    return_routed_experts: bool | None
    history_key: str
    text_key: str
    tokens_key: str
    masks_key: str
    log_probs_key: str
    routed_experts_key: str
    batching: bool | None
    min_batch_size: int | None
    max_batch_size: int | None
    batching_timeout: float
    prefer_tokens: bool
    replay: Literal["R3", "R2", "none"] | None
    temperature: float | None

    def check(self, instead: str) -> None:
        """Refuse what both wrappers refuse, before a model is loaded."""
        check_bool("pad_output", self.pad_output)
        if self.input_mode not in INPUT_MODES:
            raise ValueError(f"input_mode must be one of {INPUT_MODES}, got {self.input_mode!r}")
        template_options(self.chat_template_kwargs)
        if self.chat_template_name is not None:
            chat_template_named(self.chat_template_name)
        for name in ("batching", "min_batch_size", "max_batch_size"):
            if (value := getattr(self, name)) not in (None, False):
                raise ValueError(f"{name} must be None, got {value!r}: calls are not joined here; {instead}")
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples}")
        if self.generate:
            return
        if self.return_log_probs is False:
            raise ValueError("return_log_probs must be True when generate=False: log-probs are all that it computes")
        if self.input_mode != "tokens" and self.replay not in (None, "none"):
            raise ValueError(
                f"replay={self.replay!r} with input_mode={self.input_mode!r}: text may be encoded to other tokens than "
                "those that were sampled and routed. Use input_mode='tokens', which reads ('tokens', 'full') of the "
                "rollout, or replay='none'"
            )
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    def changed(self, changes: Mapping[str, object], reset: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of a new version; ``reset`` are those that mean nothing to it."""
        before = vars(self)
        if unknown := sorted(set(changes) - set(before)):
            raise TypeError(f"get_new_version got unknown arguments {unknown}; known: {sorted(before)}")
        follow = dict.fromkeys(reset)
        # a key that was given for the prompts is not that of full sequences, nor is text where tokens are
        if any(changes.get(name, before[name]) != before[name] for name in ("generate", "input_mode")):
            follow["input_key"] = None
        return {**before, **follow, **changes}


class PolicyWrapper(LLMWrapperBase):
    """What both wrappers share: attributes under TorchRL's names, keys, and how prompts and text are read and written.

    Attributes:
        in_keys: keys that it reads.
        out_keys: TorchRL's keys, in TorchRL's order, of what it writes.
        return_history, return_text, return_tokens, return_masks, return_log_probs: which of these it writes.
    """

    # TorchRL's base class reads them: calls of several threads are not joined
    _min_batch_size = _max_batch_size = None

    tokenizer: PreTrainedTokenizerBase
    input_key: NestedKey
    return_log_probs: bool
    return_routed_experts: bool
    replay: Literal["R3", "R2", "none"] | None

    def _set_options(self, options: WrapperOptions) -> None:
        """Keep the arguments for a new version, and set the attributes that they become."""
        self._options = options
        assert options.input_mode is not None  # as it was checked
        self.input_mode = options.input_mode
        self.generate = bool(options.generate)
        self.prefer_tokens = options.prefer_tokens
        self.pad_output = options.pad_output
        self.attention_mask_key = options.attention_mask_key
        self.history_key = options.history_key
        self.text_key = options.text_key
        self.tokens_key = options.tokens_key
        self.masks_key = options.masks_key
        self.log_probs_key = options.log_probs_key
        self.routed_experts_key = options.routed_experts_key
        self.chat_template = options.chat_template
        self.chat_template_name = options.chat_template_name
        self.tokenizer_kwargs: dict[str, object] = dict(options.tokenizer_kwargs or {})
        self.chat_template_kwargs = template_options(options.chat_template_kwargs)
        self.return_history, self.return_text = self.input_mode == "history", self.input_mode != "tokens"
        self.return_tokens = self.return_masks = True

    def _set_keys(self, input_key: NestedKey) -> None:
        """Set the keys that TorchRL's wrappers have, once it is known what is written."""
        self.input_key = input_key
        self.in_keys = [input_key, *([(self.routed_experts_key, "full")] if self.replay == "R3" else [])]
        self.keys = RolloutKeys(
            tokens=self.tokens_key,
            masks=self.masks_key,
            log_probs=self.log_probs_key if self.return_log_probs else None,
            routed_experts=self.routed_experts_key if self.return_routed_experts else None,
        )
        self.out_keys = [self.text_key] if self.return_text else []
        self.out_keys += [self.masks_key, self.tokens_key]
        self.out_keys += [self.log_probs_key] if self.return_log_probs else []
        self.out_keys += [self.history_key] if self.return_history else []
        if self.input_mode == "history":
            self._template()  # raises if there is none

    @property
    def _pad(self) -> int | None:
        """The padding token; the end-of-turn token if there is no separate one."""
        pad: int | None = getattr(self.tokenizer, "pad_token_id", None)
        return getattr(self.tokenizer, "eos_token_id", None) if pad is None else pad

    @property
    def _pad_ends_turns(self) -> bool:
        return self._pad == getattr(self.tokenizer, "eos_token_id", None)

    def _template(self, tools: object = None) -> str | None:
        """Return the chat template to render with, see :func:`template_of`."""
        return template_of(self.tokenizer, self.chat_template, self.chat_template_name, tools)

    def _template_options(self, sample: TensorDictBase) -> dict[str, object]:
        """Return the further arguments of the chat template for a sample, see :func:`options_of`."""
        row = {}
        for key in (OPTIONS, TOOLS):
            value = sample.get(key, None)
            given = value.data if isinstance(value, NonTensorData) else value
            row[key] = given.tolist() if given is value and hasattr(given, "tolist") else given
        return options_of(self.chat_template_kwargs, row)

    def _prompts(self, samples: Sequence[TensorDictBase]) -> Prompts:
        """Read a prompt from each sample, batch size ``[]``."""
        require_key(samples, self.input_key, self.input_mode)
        stack = lazy_stack(list(samples))
        if self.input_mode == "tokens":
            # after an earlier turn, "masks" cover more than the prompt
            key = (self.masks_key, "all_attention_mask")
            pairs = [(one.get(key, None), one.get(self.input_key)) for one in samples]
            fits = all(mask is not None and mask.shape == ids.shape for mask, ids in pairs)
            return prompts_from_tokens(stack, self.input_key, key if fits else self.attention_mask_key, self._pad)
        if self.input_mode == "text":
            return prompts_from_text(stack.get(self.input_key), self.tokenizer, self.tokenizer_kwargs)
        # tokens of an earlier turn, or the caller's own, where they come before the rendered text
        known = None
        if self.prefer_tokens:
            key = (self.masks_key, "all_attention_mask")
            known = [known_ids(one, self.tokens_key, one.get(key, None), self._pad) for one in samples]
        # then every chat is rendered by its own options
        chats, texts = [], []
        for sample in samples:
            # the text of a previous turn's answer, without the end of the turn, if the sample has its tokens
            ids = known_ids(sample, self.tokens_key, None, self._pad).get("response")
            if ids and ids[-1] == getattr(self.tokenizer, "eos_token_id", None):
                ids = ids[:-1]
            answered = None if ids is None else self.tokenizer.decode(ids, skip_special_tokens=False)
            chats.append(Chat.of(sample.get(self.input_key), self.input_key, answered))
            options = self._template_options(sample)
            texts.append(chats[-1].rendered(self.tokenizer, self._template(options.get(TOOLS)), options))
        return prompts_from_chats(chats, texts, self.tokenizer, known)

    @property
    def _mask_keys(self) -> list[NestedKey]:
        """Where the mask of full sequences may be: the first of them that is there counts."""
        keys = (self.masks_key, "all_attention_mask"), self.attention_mask_key
        return [key for key in keys if key is not None]

    def _stacked(self, answers: Sequence[TensorDictBase], batch: Sequence[int], samples: int | None) -> TensorDictBase:
        """Return answers in the batch size of their prompts, with a last dimension if there are several to each."""
        shape = (*batch, *(() if samples is None else (samples,)))
        if self.pad_output:
            return pad_answers(answers, self._pad or 0, self.keys, shape)
        return stack_answers(answers, shape)

    def _add_text(self, answer: TensorDictBase, prompts: Prompts, i: int, skip_special_tokens: bool) -> None:
        """Add an answer's text, and its chat, to an answer to prompt ``i``; there are none for tokens."""
        if not self.return_text:
            return
        ids = answer.get((self.tokens_key, "response")).tolist()
        response = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        answer.set(self.text_key, text_entry(prompts.texts[i], response))
        if self.return_history:
            # the template writes the end-of-turn token after the content, which does not include it
            if ids and ids[-1] == self.tokenizer.eos_token_id:
                response = self.tokenizer.decode(ids[:-1], skip_special_tokens=skip_special_tokens)
            answer.set(self.history_key, history_entry(prompts.chats[i], response))
