"""Where a wrapper's prompts come from: a chat history, text, or tokens. All end as token ids, without padding.

Only token ids go to the engine: a prompt tokenised twice, here and in the engine, may become two different sequences,
and routes belong to exactly one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text

__all__ = [
    "Prompts",
    "history_entry",
    "known_ids",
    "prompts_from_history",
    "prompts_from_text",
    "prompts_from_tokens",
    "text_entry",
]


@dataclass(slots=True)
class Prompts:
    """Prompts of a batch: ids without padding, and what they were made from, one entry per sample."""

    ids: list[list[int]]
    texts: list[str] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)


def prompts_from_history(
    history: Any,
    tokenizer: Any,
    template: str | None,
    template_name: str | None,
    known: Sequence[Mapping[str, list[int]]] | None = None,
) -> Prompts:
    """Render chats with their generation prompt.

    Args:
        history: a ``History`` of batch size ``[B, turns]``.
        tokenizer: renders and encodes.
        template: a chat template, in place of the tokenizer's.
        template_name: the name of one of TorchRL's.
        known: :func:`known_ids` of each sample, used instead of encoding the text again.

    Raises:
        TypeError: not a ``History``.
    """
    if not isinstance(history, History):
        raise TypeError(f"input_mode='history' needs a torchrl.data.llm.History, got {type(history).__name__}")
    texts = history.apply_chat_template(
        tokenizer=tokenizer, add_generation_prompt=True, chat_template=template, chat_template_name=template_name
    )
    texts = [texts] if isinstance(texts, str) else list(texts)
    histories = list(history.unbind(0))
    if known is None:
        # the template has already written the special tokens
        return Prompts(tokenizer(texts, add_special_tokens=False)["input_ids"], texts, histories)
    pairs = [_continued(text, ids, tokenizer) for text, ids in zip(texts, known, strict=True)]
    return Prompts([ids for ids, _ in pairs], [text for _, text in pairs], histories)


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
    """Return the ids that ``sample`` holds at ``tokens_key``, by leaf, without padding.

    Args:
        sample: one sample.
        tokens_key: of its ``Tokens``.
        mask: of the real tokens in ``full``, if there is one.
        pad: the pad token, to be removed at both ends if no mask fits.
    """
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

    Raises:
        ValueError: a mask does not fit its prompt.
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


def history_entry(prompt: History, content: str) -> ChatHistory:
    """Return the ``ChatHistory`` of one answer: prompt ``[turns]``, response ``[1]``, full ``[turns + 1]``."""
    response = History(role="assistant", content=content)
    full = prompt.append(response, inplace=False, dim=-1)
    return ChatHistory(prompt=prompt, response=lazy_stack([response]), full=full)
