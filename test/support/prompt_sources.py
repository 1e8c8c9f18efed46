"""A wrapper without a model, which reads prompts with TorchRL's keys and the byte tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from torchrl_moe.modules.policies.prompts import PolicyWrapper
from torchrl_moe.testing import ByteTokenizer

TOKENIZER = ByteTokenizer()


def source_of(mode: Literal["history", "text", "tokens"], entry: str = "prompt", **attributes: Any) -> PolicyWrapper:
    """A wrapper in an input mode that reads ``(mode, entry)``, with these attributes."""
    wrapper = PolicyWrapper()
    given = {
        "input_mode": mode,
        "input_key": (mode, entry),
        "tokenizer": TOKENIZER,
        "tokenizer_kwargs": {},
        "chat_template": None,
        "chat_template_name": None,
        "chat_template_kwargs": {},
        "attention_mask_key": "attention_mask",
        "tokens_key": "tokens",
        "masks_key": "masks",
        "prefer_tokens": False,
    }
    for name, value in {**given, **attributes}.items():
        setattr(wrapper, name, value)
    return wrapper
