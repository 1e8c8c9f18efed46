"""Text and chats as the tokens that a scorer reads, and as the entries that it writes beside their log-probs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import LogProbs, Masks, Text, Tokens

from torchrl_moe.modules.policies.prompt_reading import Source, require_key
from torchrl_moe.modules.policies.prompts import Chat, prompts_from_text
from torchrl_moe.modules.policies.sampling_entry import SAMPLING
from torchrl_moe.modules.policies.scoring import ScoringBatch, pad_left

__all__ = ["Encoded", "encode", "log_prob_entry", "mask_entry", "refuse_other_tokens", "token_entry", "without_pads"]


MARKS = re.compile(r"{%-?\s*generation\s*-?%}")
"""The markers of the assistant's text in a template."""
STAND_IN = "\u241ftorchrl_moe\u241f"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a batch: ``ids`` int64 ``[T]`` of each sample, their texts, and the assistant masks, bool ``[T]``."""

    ids: list[Tensor]
    texts: list[str]
    assistant: list[Tensor] | None = None

    def text_entry(self) -> Any:
        """Return the ``Text`` of the batch, of which only ``full`` is known."""
        return lazy_stack([Text(full=text) for text in self.texts])


def encode(td: TensorDictBase, source: Source) -> Encoded:
    """Read the full text or chat of each sample, and encode it.

    Args:
        td: batch size ``[B]``.
        source: where to read it, and how to render it. A chat is rendered without a generation prompt.

    Raises:
        ValueError: a sample has none.
        TypeError: a history of another type.
    """
    require_key(td.unbind(0), source.input_key, source.input_mode)
    if source.input_mode == "text":
        found = prompts_from_text(td.get(source.input_key), source.tokenizer, source.tokenizer_kwargs)
        return Encoded([torch.tensor(ids, dtype=torch.long) for ids in found.ids], found.texts)
    key = source.input_key
    chats = [_rendered(Chat.of(one.get(key), key).history, source, source.options(one)) for one in td.unbind(0)]
    masks = [mask for _, mask, _ in chats if mask is not None]
    return Encoded(
        [ids for ids, _, _ in chats], [text for _, _, text in chats], masks if len(masks) == len(chats) else None
    )


def _rendered(history: History, source: Source, options: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, str]:
    """Return the ids of one chat, the mask of the assistant's tokens, and the text."""
    template = source.template(options.get("tools"))
    ids, assistant, text = _rendered_by(template, history, source, options)
    if template is not None and source.chat_template is None and source.chat_template_name is None:
        # TorchRL's losses use the assistant mask of the template that it guesses: use the same one, if possible
        others, guessed, _ = _rendered_by(None, history, source, options)
        assistant = guessed if torch.equal(ids, others) else assistant
    return ids, assistant, text


def _rendered_by(
    template: str | None, history: History, source: Source, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, str]:
    how = {"tokenizer": source.tokenizer, "chat_template": template, "add_generation_prompt": False, **options}
    text = history.apply_chat_template(**how)
    marked = template is None or MARKS.search(template) is not None
    # without markers TorchRL takes the first occurrence of the text, which may be in a question
    tokens = history.apply_chat_template(
        **how, tokenize=True, padding=False, return_dict=True, return_assistant_tokens_mask=marked
    )
    ids = tokens.get("input_ids").long()
    if not marked:
        return ids, _spoken(history.tolist(tolist_first=True), source.tokenizer, template, text, ids, options), text
    mask = tokens.get("assistant_masks", None)
    return ids, None if mask is None else mask.bool(), text


def _spoken(
    chat: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template: str | None,
    text: str,
    ids: Tensor,
    options: Mapping[str, Any],
) -> Tensor | None:
    """Return which tokens are the assistant's text, bool ``[T]``; ``None`` if the template changes that text.

    Its position is found by rendering a placeholder instead of it.
    """
    turns = [turn for turn in chat if turn["role"] != "<none>"]  # of a ragged batch
    said = [turn["content"] or "" for turn in turns if turn["role"] == "assistant"]
    if not all(isinstance(words, str) for words in said) or not getattr(tokenizer, "is_fast", False):
        return None
    blank = [{**turn, "content": STAND_IN} if turn["role"] == "assistant" else turn for turn in turns]
    parts = tokenizer.apply_chat_template(
        blank, chat_template=template, tokenize=False, add_generation_prompt=False, **options
    ).split(STAND_IN)
    if len(parts) != len(said) + 1:
        return None
    spans, place = [], 0
    for part, words in zip(parts, [*said, ""], strict=True):
        begin = place + len(part)
        if text[place:begin] != part:
            return None
        words = words if text.startswith(words, begin) else words.strip()  # as many templates strip it
        if not text.startswith(words, begin):
            return None
        place = begin + len(words)
        spans.append((begin, place))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if place != len(text) or encoded["input_ids"] != ids.tolist():
        return None
    return torch.tensor([any(a < end and b > begin for begin, end in spans) for a, b in encoded["offset_mapping"]])


# -- entries ----------------------------------------------------------------------------------------------------------


def token_entry(rows: Sequence[Tensor], pad: int | None) -> Any:
    """Return the ``Tokens`` of a batch, in full; padded on the left with ``pad``, if there is one."""
    if pad is None:
        return lazy_stack([Tokens(full=row, padded=False) for row in rows])
    return Tokens(full=pad_left(rows, pad), padded=True, batch_size=[len(rows)])


def mask_entry(attention: Sequence[Tensor], assistant: Sequence[Tensor] | None, padded: bool) -> Any:
    """Return the ``Masks`` of a batch."""
    if not padded:
        spoken: Sequence[Tensor | None] = [None] * len(attention) if assistant is None else assistant
        pairs = zip(attention, spoken, strict=True)
        return lazy_stack([Masks(all_attention_mask=a, all_assistant_mask=b, padded=False) for a, b in pairs])
    return Masks(
        all_attention_mask=pad_left(attention, False),
        all_assistant_mask=None if assistant is None else pad_left(assistant, False),
        padded=True,
        batch_size=[len(attention)],
    )


def log_prob_entry(batch: ScoringBatch, log_probs: Tensor, padded: bool) -> Any:
    """Return the ``LogProbs`` of a batch, from ``[B, T]``."""
    if padded:
        return LogProbs(full=log_probs, padded=True, batch_size=[len(log_probs)])
    return lazy_stack([LogProbs(full=row, padded=False) for row in batch.split(log_probs)])


# -- checks -----------------------------------------------------------------------------------------------------------


def refuse_other_tokens(td: TensorDictBase, tokens_key: str, ids: Sequence[Tensor]) -> None:
    """Refuse samples of truncated sampling whose text encodes to tokens other than those sampled.

    The kept words are known only for the sampled tokens.

    Raises:
        ValueError: see above.
    """
    for i, (sample, row) in enumerate(zip(td.unbind(0), ids, strict=True)):
        own, kept = sample.get((tokens_key, "full"), None), sample.get((SAMPLING, "kept"), None)
        if kept is not None and (own is None or not torch.equal(own.cpu(), row)):
            raise ValueError(
                f"sample {i} says from which words its tokens were sampled, and its text makes other tokens: score it "
                "with input_mode='tokens', or exclude 'sampling'"
            )


def without_pads(ids: Tensor, pad: int) -> Tensor:
    """Return the mask, bool ``[B, T]``, of the tokens between the padding at both ends of each row.

    >>> without_pads(torch.tensor([[0, 0, 5, 0, 6], [7, 8, 0, 0, 0]]), 0).int().tolist()
    [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
    """
    real = ids != pad
    return real.cummax(-1).values & real.flip(-1).cummax(-1).values.flip(-1)
