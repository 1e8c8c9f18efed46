"""The tensors of a scoring pass: token sequences laid out as a batch, run through a model, and read back.

Sequences of unequal length are padded on the left, as TorchRL's losses read them, or packed into one row; both give
the same log-probs. Nothing here knows which experts are used.

Letters: B sequences, T tokens of the longest, N all tokens, V vocabulary, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.nn.functional import log_softmax

__all__ = [
    "ScoringBatch",
    "align",
    "check_dense",
    "missing",
    "pad_left",
    "read_batch",
    "read_rows",
    "samples_of",
    "token_scores",
]


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """Tokens of a batch. ``ids`` int64 ``[B, T]``, ``mask`` bool ``[B, T]``; pads may stand on both sides.

    ``lengths`` counts the rows of each sample, its own pads included: what is left of them was added here.
    """

    ids: Tensor
    mask: Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> ScoringBatch:
        """Return the batch on ``device``."""
        return ScoringBatch(self.ids.to(device), self.mask.to(device), self.lengths)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return ``[B, T, ...]`` as one tensor per sample, as long as the sample's own rows."""
        return [row[len(row) - length :] for row, length in zip(values, self.lengths, strict=True)]

    @property
    def scored(self) -> Tensor:
        """bool ``[B, T]``: tokens that have a token before them."""
        before = torch.zeros_like(self.mask)
        before[:, 1:] = self.mask[:, :-1]
        return self.mask & before

    def padded_inputs(self) -> dict[str, Tensor]:
        """Return the model's inputs with padding."""
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return {"input_ids": self.ids, "attention_mask": self.mask.long(), "position_ids": positions}

    def packed_inputs(self) -> dict[str, Tensor]:
        """Return the model's inputs in one row ``[1, N]``; positions that start over separate the sequences."""
        positions = (self.mask.cumsum(-1) - 1)[self.mask]
        return {"input_ids": self.ids[self.mask][None], "position_ids": positions[None]}

    def unpack(self, values: Tensor) -> Tensor:
        """Return ``[1, N, ...]`` as ``[B, T, ...]``, zero on pads."""
        out = values.new_zeros(*self.mask.shape, *values.shape[2:])
        return out.masked_scatter(self.mask.view(*self.mask.shape, *[1] * (values.ndim - 2)).expand_as(out), values[0])


def pad_left(rows: Sequence[Tensor], value: Any) -> Tensor:
    """Stack ``[T, ...]`` rows to ``[B, T, ...]``, padded on the left."""
    longest = max(len(row) for row in rows)
    out = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), value)
    for i, row in enumerate(rows):
        out[i, longest - len(row) :] = row
    return out


def samples_of(td: TensorDictBase, key: Any) -> Sequence[Tensor | None] | None:
    """Return an entry of a dense, a lazily stacked or a nested batch, sample by sample; ``None`` if it is not there."""
    rows = td.get(key, None, as_list=True)
    if isinstance(rows, Tensor) and rows.is_nested:
        return list(rows.unbind())
    return rows


def read_rows(
    td: TensorDictBase,
    key: Any,
    value: Any,
    lengths: Sequence[int] | None = None,
) -> Tensor | None:
    """Read a per-token entry of a dense, a lazily stacked or a nested batch as ``[B, T, ...]``.

    Args:
        td: batch size ``[B]``.
        key: of the entry.
        value: what to pad with on the left.
        lengths: the rows that each sample must have. A short entry would be padded to the wrong tokens.

    Returns:
        The entry, or ``None`` if a sample has none.

    Raises:
        ValueError: a sample has another number of rows.
    """
    rows = _all_samples(td, key)
    if rows is None:
        return None
    for i, (row, length) in enumerate(zip(rows, lengths or map(len, rows), strict=True)):
        if len(row) != length:
            raise ValueError(
                f"{key!r} of sample {i} has {len(row)} rows, its tokens are {length}: both must have been cut or "
                "padded alike"
            )
    return pad_left(rows, value)


def _all_samples(td: TensorDictBase, key: Any) -> list[Tensor] | None:
    samples = samples_of(td, key)
    rows = [] if samples is None else [row for row in samples if row is not None]
    return rows if len(rows) == len(td) else None


def read_batch(td: TensorDictBase, tokens_key: Any, mask_key: Any) -> ScoringBatch:
    """Read the tokens to score; without a mask all are real.

    Raises:
        KeyError: there are no tokens at ``tokens_key``.
        ValueError: another batch size than ``[B]``, or an attention mask of another length than its tokens.
    """
    if td.batch_dims != 1 or not len(td):
        raise ValueError(
            f"scoring takes a batch of sequences, batch size [B] with B >= 1, got {list(td.batch_size)}: use "
            "td.reshape(-1) on a batch of more dimensions, and td.unsqueeze(0) on a single sample"
        )
    rows = _all_samples(td, tokens_key)
    if rows is None:
        raise missing(td, tokens_key)
    lengths = tuple(len(row) for row in rows)
    mask = read_rows(td, mask_key, False, lengths)
    if mask is None:
        mask = pad_left([torch.ones_like(row, dtype=torch.bool) for row in rows], False)
    return ScoringBatch(pad_left(rows, 0).long(), mask.bool(), lengths)


def missing(td: TensorDictBase, key: Any) -> KeyError:
    """Return the error for an entry that some sample does not have."""
    return KeyError(f"no {key!r} in every sample; the first one has {sorted(map(str, td[0].keys(True, True)))}")


def align(logits: Tensor, temperature: float) -> Tensor:
    """Return a model's logits ``[B, T, V]`` moved by one, so that row t is of token t's own distribution; float32.

    Row 0 is zero: nothing comes before a first token.
    """
    return torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1).float() / temperature


def token_scores(logits: Tensor, ids: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies of the distributions that tokens were drawn from.

    Args:
        logits: ``[B, T, V]``; row t is the model's output at token t, so it scores token t + 1.
        ids: ``[B, T]``.
        temperature: of sampling; the logits are divided by it.
        entropy: whether to compute entropies.

    Returns:
        float32 ``[B, T]`` each, of token t given the tokens before it; 0 at t = 0.
    """
    log_probs = log_softmax(logits[:, :-1].float() / temperature, -1)
    chosen = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    first = chosen.new_zeros(len(ids), 1)
    spread = -(log_probs.exp() * log_probs).sum(-1) if entropy else None
    return torch.cat([first, chosen], 1), None if spread is None else torch.cat([first, spread], 1)


def check_dense(logits_key: NestedKey, padding_side: str) -> None:
    """Raise ValueError on what TorchRL's masked distributions could be asked for, and dense ones cannot."""
    if padding_side != "left" or logits_key != "logits":
        raise ValueError(
            f"distributions are padded on the left and made from 'logits', got padding_side={padding_side!r} and "
            f"logits_key={logits_key!r}"
        )
