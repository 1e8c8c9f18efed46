"""A wrapper without a model, which reads prompts with TorchRL's keys and the byte tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from torchrl_moe.modules.policies.prompts import PolicyWrapper
from torchrl_moe.testing import ByteTokenizer

TOKENIZER = ByteTokenizer()


def source_of(mode: Literal["history", "text", "tokens"], entry: str = "prompt", **attributes: Any) -> PolicyWrapper:
    """A wrapper in an input mode that reads ``(mode, entry)``, with these attributes."""
    wrapper = PolicyWrapper()
    nothing = dict.fromkeys(("chat_template", "chat_template_name"))
    keys = {name: name.removesuffix("_key") for name in ("attention_mask_key", "tokens_key", "masks_key")}
    given = {"input_mode": mode, "input_key": (mode, entry), "tokenizer": TOKENIZER, "prefer_tokens": False, **nothing}
    given |= {**keys, "tokenizer_kwargs": {}, "chat_template_kwargs": {}}
    for name, value in {**given, **attributes}.items():
        setattr(wrapper, name, value)
    return wrapper
