"""Full sequences (prompt and answer) of every input kind, as a wrapper scores them, and the entries that it writes.

Tokens keep their layout, padding included; text and chats are encoded, without padding. Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_moe.modules.policies.prompt_reading import Source, require_key
from torchrl_moe.modules.policies.scoring import pad_left
from torchrl_moe.modules.policies.text_scoring import encode

__all__ = ["FullSequence", "pad_scored", "read_sequences", "scored_tensordict"]


@dataclass(slots=True)
class FullSequence:
    """One sequence.

    Shapes:
        - ids: int64 ``[T]``
        - mask: bool ``[T]``, tokens that are not padding
        - assistant: bool ``[T]``, the assistant's tokens; ``None`` if that is not known

    ``text`` and ``history`` are what it was made from.
    """

    ids: Tensor
    mask: Tensor
    assistant: Tensor | None = None
    text: str | None = None
    history: History | None = None


def read_sequences(samples: Sequence[TensorDictBase], source: Source) -> list[FullSequence]:
    """Read a sequence from each sample, batch size ``[]``.

    Tokens have the mask that is at ``source.masks_key``, or else at ``source.attention_mask_key``. Without one, padding
    at both ends is ignored; if the pad token also ends turns, the first one after the tokens is real.

    Raises:
        ValueError: a sample has nothing at ``source.input_key``, or a mask does not fit its tokens.
        TypeError: an entry that should be a ``History`` is not.
    """
    if source.input_mode == "tokens":
        require_key(samples, source.input_key, source.input_mode)
        return [_tokens(sample, source, i) for i, sample in enumerate(samples)]
    stack = lazy_stack(list(samples))
    encoded = encode(stack, source)
    spoken: Sequence[Tensor | None] = encoded.assistant or [None] * len(encoded.ids)
    chats: Sequence[History | None] = [None] * len(encoded.ids)
    if source.input_mode == "history":
        chats = list(stack.get(source.input_key).unbind(0))
    return [
        FullSequence(ids, torch.ones_like(ids, dtype=torch.bool), assistant, text, chat)
        for ids, assistant, text, chat in zip(encoded.ids, spoken, encoded.texts, chats, strict=True)
    ]


def _tokens(sample: TensorDictBase, source: Source, position: int) -> FullSequence:
    ids = sample.get(source.input_key)
    for key in ((source.masks_key, "all_attention_mask"), source.attention_mask_key):
        mask = None if key is None else sample.get(key, None)
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(
                f"sample {position}: {key!r} has shape {list(mask.shape)} and {source.input_key!r} {list(ids.shape)}: "
                "both must have been cut or padded alike, or take the mask out"
            )
        if mask is not None:
            return FullSequence(ids, mask.bool())
    return FullSequence(ids, _real(ids, source.pad, getattr(source.tokenizer, "eos_token_id", None)))


def _real(ids: Tensor, pad: int | None, end: int | None) -> Tensor:
    """Return which tokens are real, where no mask says so."""
    real = torch.ones_like(ids, dtype=torch.bool)
    if pad is None:
        return real
    (places,) = torch.where(ids != pad)
    if not len(places):
        return ~real
    real[: places[0]] = False
    real[places[-1] + (2 if pad == end else 1) :] = False
    return real


def scored_tensordict(sequence: FullSequence, log_probs: Tensor, keys: Mapping[str, Any]) -> TensorDict:
    """Return what is written of one sequence, batch size ``[]``.

    Args:
        sequence: the sequence.
        log_probs: float32 ``[T]``, 0 on pads and on the first token.
        keys: where ``tokens``, ``masks``, ``log_probs``, ``text`` and ``history`` go.
    """
    masks = {"all_attention_mask": sequence.mask}
    if sequence.assistant is not None:
        masks["all_assistant_mask"] = sequence.assistant
    source: dict[Any, Any] = {
        keys["tokens"]: Tokens(full=sequence.ids, padded=False),
        keys["masks"]: Masks(**masks, padded=False),
        keys["log_probs"]: LogProbs(full=log_probs, padded=False),
    }
    if sequence.text is not None:
        source[keys["text"]] = Text(full=sequence.text)
    if sequence.history is not None:
        source[keys["history"]] = ChatHistory(full=sequence.history)
    return TensorDict(source)


def pad_scored(scored: Sequence[TensorDictBase], pad_token_id: int, keys: Mapping[str, Any]) -> TensorDict:
    """Stack what is written of several sequences densely, batch size ``[B]``: tokens padded on the left, and all else.

    Args:
        scored: of each sequence, from :func:`scored_tensordict`.
        pad_token_id: what pads tokens.
        keys: as there.
    """
    batch = [len(scored)]
    padded = TensorDict(batch_size=batch)
    for name, kind, value in (("tokens", Tokens, pad_token_id), ("masks", Masks, False), ("log_probs", LogProbs, 0.0)):
        rows = [one.get(keys[name]) for one in scored]
        leaves = [leaf for leaf in ("full", "all_attention_mask", "all_assistant_mask") if _has(rows[0], leaf)]
        entry = {leaf: pad_left([row.get(leaf) for row in rows], value) for leaf in leaves}
        padded.set(keys[name], kind(**entry, padded=True, batch_size=batch))
    for name in ("text", "history"):
        rows = [one.get(keys[name], None) for one in scored]
        if rows[0] is not None:
            padded.set(keys[name], lazy_stack(rows))
    return padded


def _has(entry: Any, leaf: str) -> bool:
    return entry.get(leaf, None) is not None
