"""The prompts of a batch, read from the keys that a wrapper's arguments name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensordict import NestedKey, NonTensorData, TensorDictBase, lazy_stack

from torchrl_moe._compat_generation import chat_template_named
from torchrl_moe.modules.policies import prompts as reading
from torchrl_moe.modules.policies.prompts import Chat, Prompts

__all__ = [
    "Source",
    "check_templates",
    "options_of",
    "reads_chats",
    "refuse_batching",
    "require_key",
    "template_of",
    "template_options",
]

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
        """Read a prompt from each sample, batch size ``[]``.

        Raises:
            ValueError: a sample has none, or a mask does not fit.
            TypeError: a history of another type.
        """
        require_key(samples, self.input_key, self.input_mode)
        stack = lazy_stack(list(samples))
        if self.input_mode == "tokens":
            return reading.prompts_from_tokens(stack, self.input_key, self._mask_key(samples), self.pad)
        if self.input_mode == "text":
            return reading.prompts_from_text(stack.get(self.input_key), self.tokenizer, self.tokenizer_kwargs)
        known = None
        if self.prefer_tokens:
            mask = (self.masks_key, "all_attention_mask")
            known = [reading.known_ids(one, self.tokens_key, one.get(mask, None), self.pad) for one in samples]
        chats = [Chat.of(one.get(self.input_key), self.input_key, self._answered(one)) for one in samples]
        texts = [self.text_of(chat, sample) for chat, sample in zip(chats, samples, strict=True)]
        return reading.prompts_from_chats(chats, texts, self.tokenizer, known)

    def _answered(self, sample: TensorDictBase) -> str | None:
        """Return the text of a previous turn's answer, if the sample has its tokens: without the end of the turn."""
        ids = reading.known_ids(sample, self.tokens_key, None, self.pad).get("response")
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
    """Refuse a wrapper's ``chat_template_kwargs`` and ``chat_template_name``, before a model is loaded.

    Raises:
        TypeError: see :func:`template_options`.
        ValueError: see there, or an unknown name.
    """
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

    Raises:
        ValueError: there is none.
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
    """Return the further arguments of the chat template for a row: the common ones, changed by those in the row.

    Args:
        common: of all rows.
        row: may have ``"chat_template_kwargs"`` and ``"tools"``.

    Raises:
        TypeError: see :func:`template_options` and :func:`tool_list`.
        ValueError: see :func:`template_options`.
    """
    options, tools = {**common, **template_options(row.get(OPTIONS))}, tool_list(row.get(TOOLS))
    return {**options, TOOLS: tools} if tools else options


def template_options(given: Any) -> dict[str, Any]:
    """Return ``chat_template_kwargs``, checked; ``None`` is none.

    Raises:
        TypeError: they are no mapping.
        ValueError: they name an argument that is not the template's.
    """
    if not isinstance(given, Mapping | None) or not all(isinstance(name, str) for name in given or ()):
        raise TypeError(f"{OPTIONS} must be a mapping of names to values, got {given!r:.100}")
    if taken := sorted(set(given or ()) & set(NOT_THE_TEMPLATES)):
        raise ValueError(f"{OPTIONS} are a template's own arguments, such as enable_thinking; {taken[0]!r} is not one")
    return dict(given or {})


def tool_list(given: Any) -> list[Any] | None:
    """Return a sample's ``tools``: JSON schemas or functions, or the same schemas as JSON text; ``None`` is none.

    Raises:
        TypeError: they are something else.
    """
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
