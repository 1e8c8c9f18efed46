"""Where a wrapper's prompts come from: a chat history, text, or tokens. All end as token ids, without padding.

Only token ids go to the engine: a prompt tokenised twice, here and there, may end up as two different sequences, and
routes belong to exactly one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text

__all__ = ["Prompts", "history_entry", "prompts_from_history", "prompts_from_text", "prompts_from_tokens", "text_entry"]


@dataclass(slots=True)
class Prompts:
    """Prompts of a batch: ids without padding, and what they were made from, one entry per sample."""

    ids: list[list[int]]
    texts: list[str] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)


def prompts_from_history(
    history: Any, tokenizer: Any, template: str | None, template_name: str | None, known_ids: list[Tensor] | None
) -> Prompts:
    """Render chats with their generation prompt.

    Args:
        history: a ``History`` of batch size ``[B, turns]``.
        tokenizer: renders and encodes.
        template: a chat template, in place of the tokenizer's.
        template_name: the name of one of TorchRL's.
        known_ids: ids to take instead of encoding anew, one tensor per sample.

    Raises:
        TypeError: not a ``History``.
    """
    if not isinstance(history, History):
        raise TypeError(f"input_mode='history' needs a torchrl.data.llm.History, got {type(history).__name__}")
    if known_ids is not None:
        ids = [row.tolist() for row in known_ids]
        return Prompts(ids, tokenizer.batch_decode(ids, skip_special_tokens=False), list(history.unbind(0)))
    texts = history.apply_chat_template(
        tokenizer=tokenizer, add_generation_prompt=True, chat_template=template, chat_template_name=template_name
    )
    texts = [texts] if isinstance(texts, str) else list(texts)
    # the template has written the special tokens
    return Prompts(tokenizer(texts, add_special_tokens=False)["input_ids"], texts, list(history.unbind(0)))


def prompts_from_text(texts: Any, tokenizer: Any, tokenizer_kwargs: dict[str, Any]) -> Prompts:
    """Encode text prompts: a string, a list of them, or a non-tensor stack."""
    listed = [texts] if isinstance(texts, str) else list(texts if isinstance(texts, list) else texts.tolist())
    return Prompts(tokenizer(listed, **tokenizer_kwargs)["input_ids"], listed)


def prompts_from_tokens(tensordict: TensorDictBase, key: Any, mask_key: Any, pad_token_id: int | None) -> Prompts:
    """Read token prompts without their padding.

    A mask decides if there is one. Else pads are taken off the two ends only: the pad token may well be the
    end-of-turn token, which is real inside a prompt.
    """
    rows = list(tensordict.get(key, as_list=True))
    masks = tensordict.get(mask_key, None, as_list=True) if mask_key is not None else None
    if masks is None or any(len(mask) != len(row) for mask, row in zip(masks, rows, strict=True)):
        return Prompts([_trimmed(row, pad_token_id) for row in rows])
    return Prompts([row[mask.bool()].tolist() for row, mask in zip(rows, masks, strict=True)])


def _trimmed(row: Tensor, pad_token_id: int | None) -> list[int]:
    if pad_token_id is None:
        return list(row.tolist())
    (real,) = torch.where(row != pad_token_id)
    return list(row[real[0] : real[-1] + 1].tolist()) if len(real) else []


def text_entry(prompt: str, response: str) -> Text:
    """Return the ``Text`` of one answer."""
    return Text(prompt=prompt, response=response, full=prompt + response)


def history_entry(prompt: History, content: str) -> ChatHistory:
    """Return the ``ChatHistory`` of one answer: prompt ``[turns]``, response ``[1]``, full ``[turns + 1]``."""
    response = History(role="assistant", content=content)
    full = prompt.append(response, inplace=False, dim=-1)
    return ChatHistory(prompt=prompt, response=History(role="assistant", content=content, batch_size=(1,)), full=full)
