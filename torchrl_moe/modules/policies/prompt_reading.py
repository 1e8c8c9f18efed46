"""The prompts of a batch, read from the keys that a wrapper's arguments name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import NestedKey, TensorDictBase, lazy_stack
from torchrl.data.llm import History

from torchrl_moe.modules.policies import prompts as reading
from torchrl_moe.modules.policies.prompts import Prompts

__all__ = ["Source", "require_history", "require_key"]


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

    @property
    def own_template(self) -> str | None:
        """The template to render with; ``None`` for the one that ``chat_template_name`` names, or TorchRL's guess.

        A tokenizer's own template takes precedence over the guess, which depends on the path that the tokenizer was
        loaded from. If it has several, ``"default"`` is used for chats.
        """
        if self.chat_template is not None or self.chat_template_name is not None:
            return self.chat_template
        own = getattr(self.tokenizer, "chat_template", None)
        return own.get("default") if isinstance(own, dict) else own

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
        history = require_history(stack.get(self.input_key), self.input_key)
        return reading.prompts_from_history(history, self.tokenizer, self.own_template, self.chat_template_name, known)

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


def require_history(history: Any, key: NestedKey) -> History:
    """Return ``history``.

    Raises:
        TypeError: it is not one.
    """
    if not isinstance(history, History):
        raise TypeError(f"Expected History object (torchrl.data.llm.History) at {key!r}, got {type(history).__name__}")
    return history
