"""The inputs of a loss, read from a tensordict into aligned ``[B, T]`` tensors.

Ragged samples (a lazy stack) are padded on the left to the longest, so that their last tokens share a column; a dense
batch keeps its padding. This module decides which tokens count, not what is computed from them.

Letters: B sequences, T tokens of the longest, P_i prompt and T_i prompt and response tokens of sequence i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_moe import _checks
from torchrl_moe._errors import MissingEntryError

__all__ = ["Masking", "TokenBatch", "TokenReader"]

Masking: TypeAlias = Literal["sft", "rlhf", "generic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """What a loss computes with. Where ``mask`` is False, the other values are undefined."""

    tokens: Tensor
    """int64 ``[B, T]``."""
    mask: Tensor
    """bool ``[B, T]``: the tokens to train on whose sample log-prob is known."""
    unsampled: Tensor
    """bool ``[B, T]``: the tokens to train on whose sample log-prob should be known, but is not."""
    advantage: Tensor
    """``[B, T]``."""
    sample_log_probs: Tensor
    """``[B, T]``, of the policy that generated the tokens."""
    ref_log_probs: Tensor | None
    """``[B, T]``, NaN where there is none; ``None`` if no loss term needs it."""
    prox_log_probs: Tensor | None
    """``[B, T]``, of the proximal policy, if it was recomputed; NaN where there is none."""
    staleness: Tensor | None
    """int64 ``[B, T]``, number of weight updates since each token was sampled, if a correction needs it."""
    num_valid_tokens: Tensor | None
    """``[]``, valid tokens of the whole batch, if this is a part of it."""
    num_sequences: Tensor | None
    """``[]``, the same for sequences."""
    sum_weights: Tensor | None
    """``[]``, the same for importance weights."""

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if value is not None})


class TokenReader:
    """Reads entries with a value per token.

    Args:
        tensordict: batch size ``[B]``, ragged or dense.
        tokens_key: the entry that says how many tokens each sample has.

    Raises:
        ValueError: another batch size, tokens that are not integers, or an entry that is missing or has another number
            of tokens.
    """

    def __init__(self, tensordict: TensorDictBase, tokens_key: NestedKey) -> None:
        if tensordict.batch_dims != 1 or not len(tensordict):
            raise ValueError(
                f"the loss takes a batch of sequences, batch size [B] with B >= 1, got {list(tensordict.batch_size)}: "
                "use td.reshape(-1) on a batch of more dimensions, and td.unsqueeze(0) on a single sample."
            )
        self._td = tensordict
        self._tokens_key = tokens_key
        rows = self._rows(tokens_key, "the token ids of prompt and response")
        self.lengths = [len(row) for row in rows]
        self.tokens = _pad_left(rows, 0)
        _checks.check_integer(repr(tokens_key), self.tokens)

    def per_token(self, key: NestedKey, meaning: str, fill: float = 0.0) -> Tensor:
        """Return the ``[T_i]`` rows of ``key`` as ``[B, T]``, with ``fill`` on the left."""
        rows = self._rows(key, meaning)
        for i, (row, length) in enumerate(zip(rows, self.lengths, strict=True)):
            _checks.check_shape(f"{key!r} of sample {i}", row.shape, (length,), hint=self._hint)
        return _pad_left(rows, fill)

    def routes(self, key: NestedKey) -> Tensor:
        """Return the experts ``[T_i, L, K]`` of ``key`` as int64 ``[B, T, L, K]``, -1 on the left."""
        rows = self._rows(key, "the experts that each token was routed to")
        for i, (row, length) in enumerate(zip(rows, self.lengths, strict=True)):
            _checks.check_shape(f"{key!r} of sample {i}", row.shape, (length, "L", "K"), hint=self._hint)
            _checks.check_integer(f"{key!r} of sample {i}", row)
        return _pad_left([row.long() for row in rows], -1)

    @property
    def _hint(self) -> str:
        return f"It has a value for each token of {self._tokens_key!r}: check that both were cut or padded alike."

    def mask(self, masking: Masking, prompt: NestedKey, attention: NestedKey, assistant: NestedKey) -> Tensor:
        """Return the tokens to train on, bool ``[B, T]``.

        - ``"sft"``: attended tokens after the first ``len(prompt row)`` positions of the sample;
        - ``"rlhf"``: the tokens of the assistant mask;
        - ``"generic"``: all attended tokens.
        """
        if masking == "rlhf":
            return self.per_token(assistant, "the mask of all assistant tokens (masking_strategy='rlhf')").bool()
        mask = self.per_token(attention, f"the attention mask (masking_strategy={masking!r})").bool()
        if masking == "generic":
            return mask
        meaning = "the prompt's token ids (masking_strategy='sft'); 'rlhf' uses the assistant mask instead"
        responses = []
        for i, (row, length) in enumerate(zip(self._rows(prompt, meaning), self.lengths, strict=True)):
            if len(row) > length:
                raise ValueError(
                    f"{prompt!r} of sample {i} has {len(row)} tokens, got only {length} in all. {self._hint}"
                )
            responses.append(torch.arange(length, device=row.device) >= len(row))
        return mask & _pad_left(responses, False)

    def advantage(self, key: NestedKey) -> Tensor:
        """Return the advantages ``[B, T]`` from ``[T_i, 1]`` per token or ``[1, 1]`` per sample."""
        hint = (
            "It is [1, 1] for a whole sample or [T, 1] per token; MCAdvantage gives the former if the reward is "
            "[*batch, 1, 1]."
        )
        rows = self._rows(key, "the advantages")
        per_token = []
        for i, (row, length) in enumerate(zip(rows, self.lengths, strict=True)):
            name = f"{key!r} of sample {i}"
            if row.shape != (1, 1):
                _checks.check_shape(name, row.shape, (length, 1), hint=hint)
            _checks.check_floating(name, row)
            per_token.append(row[:, 0].expand(length))
        return _pad_left(per_token, 0.0)

    def constant_log_probs(self, key: NestedKey, meaning: str) -> Tensor:
        """Return log-probs ``[B, T]`` that are data, not results of the model being trained."""
        values = self.per_token(key, f"the log-probs of {meaning}")
        _checks.check_floating(repr(key), values)
        if values.requires_grad:
            raise ValueError(f"{key!r} requires grad, but {meaning} is a constant: store it detached.")
        return values

    def staleness(self, versions_key: NestedKey, current_key: NestedKey, mask: Tensor) -> Tensor:
        """Return how many weight updates ago each token was sampled, int64 ``[B, T]``; 0 outside ``mask``."""
        versions = self.per_token(versions_key, "the version of the weights that sampled each token", fill=-1)
        _checks.check_integer(repr(versions_key), versions)
        current = self.total(current_key)
        if current is None:
            raise MissingEntryError(
                f"the tensordict has no {current_key!r}: the version of the weights being trained, which the age of a "
                "token is counted from. Store the number that the weight sync reports: td['current_version'] = "
                "torch.full(td.batch_size, version)."
            )
        staleness = torch.where(mask, current.long() - versions.long(), 0)
        if bool(((staleness < 0) | (mask & (versions < 0))).any()):
            raise ValueError(
                f"{versions_key!r} must be in 0..{int(current)} ({current_key!r}) where a token counts, got "
                f"{versions[mask].unique().tolist()}: -1 is for tokens that no policy sampled."
            )
        return staleness

    def ref_log_probs(self, key: NestedKey, side: Literal["left", "right"], fill: float) -> Tensor:
        """Return the reference's log-probs ``[B, T]`` from ``[T_i]`` or ``[T_i, 1]``, short rows filled on ``side``."""
        hint = (
            "RetrieveLogProb writes them. For a kl_mask_threshold around the policy that sampled, which is what "
            "TorchRL's code computes, name that policy's: set_keys(ref_log_probs=('log_probs', 'full'))."
        )
        rows = self._rows(key, "the ref log-probs (kl_to_ref_coeff, kl_mask_threshold)", hint)
        complete = []
        for i, (row, length) in enumerate(zip(rows, self.lengths, strict=True)):
            values = row[:, 0] if row.ndim == 2 and row.shape[-1] == 1 else row
            missing = max(0, length - len(values))
            pads = (missing, 0) if side == "left" else (0, missing)
            values = torch.nn.functional.pad(values.detach(), pads, value=fill)
            _checks.check_shape(f"{key!r} of sample {i}", values.shape, (length,), hint=self._hint)
            _checks.check_floating(f"{key!r} of sample {i}", values)
            complete.append(values)
        return _pad_left(complete, fill)

    def total(self, key: NestedKey) -> Tensor | None:
        """Return a number ``[]`` that all samples share; ``None`` if there is none."""
        value: Any = self._td.get(key, None)
        if value is None:
            return None
        flat = value.flatten() if isinstance(value, Tensor) else torch.zeros(0)
        if not len(flat) or bool((flat != flat[0]).any()) or not bool(flat[0] >= 0):
            raise ValueError(
                f"{key!r} must be a tensor of one number, 0 or more and the same for each sample, got {value}: it is "
                "of the whole batch, and stored in each of its parts."
            )
        return flat[0]

    def _rows(self, key: NestedKey, meaning: str, hint: str = "") -> list[Tensor]:
        rows: Any = self._td.get(key, None, as_list=True)
        if rows is None:
            known = sorted(map(repr, self._td.keys(True, True)))
            raise MissingEntryError(
                f"Couldn't find {meaning}: the tensordict has no {key!r}. It has {', '.join(known)}. If it is there "
                f"under another name, tell the loss by set_keys(). {hint}".rstrip()
            )
        return list(rows.unbind(0)) if isinstance(rows, Tensor) else list(rows)


def _pad_left(rows: Sequence[Tensor], fill: float) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=fill, padding_side="left")
