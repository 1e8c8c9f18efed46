"""Where a wrapper reads its prompts, with TorchRL's keys and the byte tokenizer."""

from __future__ import annotations

from typing import Literal

from torchrl_moe.modules.policies.prompts import Source
from torchrl_moe.testing import ByteTokenizer

TOKENIZER = ByteTokenizer()


def source_of(mode: Literal["history", "text", "tokens"], entry: str = "prompt") -> Source:
    """The source of a wrapper in an input mode that reads ``(mode, entry)``."""
    return Source(
        input_mode=mode,
        input_key=(mode, entry),
        tokenizer=TOKENIZER,
        tokenizer_kwargs={},
        chat_template=None,
        chat_template_name=None,
        attention_mask_key="attention_mask",
        tokens_key="tokens",
        masks_key="masks",
        prefer_tokens=False,
        pad=256,
    )
