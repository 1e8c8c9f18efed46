"""What the rows of a batch say of themselves: reward, tokens, texts, versions. Of any collector, in any input mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_moe.collectors.group import num_segments
from torchrl_moe.render.text_tables import one_line

__all__ = ["SampleReader", "rows_of"]

ABSENT = "–"


def rows_of(batch: TensorDictBase) -> list[TensorDictBase]:
    """Return the rows of a batch of any shape, in order, each of batch size ``[]``."""
    if not batch.ndim:
        return [batch]
    parts = list(batch.unbind(0))
    return parts if batch.ndim == 1 else [row for part in parts for row in rows_of(part)]


class SampleReader:
    """Reads rows; what is missing in one is shown as ``–``.

    Args:
        policy: names the keys (TorchRL's, unless it says otherwise), and has the tokenizer for rows without texts.
    """

    COLUMNS = ("group", "prompt", "answer", "reward", "tokens", "version", "segments", "finish_reason")

    def __init__(self, policy: Any) -> None:
        self._text, self._tokens, self._masks = (
            getattr(policy, f"{name}_key", None) or name for name in ("text", "tokens", "masks")
        )
        self._tokenizer = getattr(policy, "tokenizer", None)

    def figures(self, batch: TensorDictBase) -> dict[str, int | float]:
        """Return the numbers of rows, groups and generated tokens, and mean and standard deviation of the rewards.

        The deviation is that of the rows themselves (divided by their number). NaN where no row has a reward.
        """
        rows = rows_of(batch)
        rewards = [reward for row in rows if (reward := _reward(row)) is not None] or [float("nan")]
        groups = {group for row in rows if (group := _plain(row.get("group_id", None))) is not None}
        return {
            "rows": len(rows),
            "groups": len(groups),
            "tokens": sum(self._num_tokens(row) for row in rows),
            "reward_mean": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
        }

    def cells(self, row: TensorDictBase, characters: int) -> tuple[str, ...]:
        """Return the texts of :attr:`COLUMNS` of a row, batch size ``[]``; prompts and answers cut to so many."""
        versions = row.get(("policy_versions", "full"), None)
        versions = None if versions is None else versions[versions >= 0]
        segments = _plain(row.get("num_segments", None))
        if segments is None and versions is not None:
            segments = num_segments(versions)
        return (
            _cell(_plain(row.get("group_id", None))),
            *(one_line(self._part(row, part), characters) for part in ("prompt", "response")),
            _cell(_reward(row)),
            _cell(self._num_tokens(row)),
            _cell(_plain(row.get("policy_version", None))) if versions is None else _span(versions),
            _cell(segments),
            _cell(_plain(row.get("finish_reason", None))),
        )

    def _num_tokens(self, row: TensorDictBase) -> int:
        """How many tokens were generated, padding left out."""
        tokens = row.get(self._tokens, None)
        ids = None if tokens is None else tokens.get("response", None)
        if ids is None:
            return 0
        mask = row.get((self._masks, "all_attention_mask"), None) if getattr(tokens, "padded", False) else None
        return len(ids) if mask is None or not len(ids) else int(mask[-len(ids) :].sum())

    def _part(self, row: TensorDictBase, part: str) -> str:
        """Return the prompt or the response as text; in token mode it is decoded here."""
        text = _plain(row.get((self._text, part), None))
        ids = row.get((self._tokens, part), None)
        if text is not None or ids is None:
            return "" if text is None else str(text)
        if getattr(row.get(self._tokens), "padded", False):
            mask = row.get((self._masks, "all_attention_mask"), None)
            if mask is not None and len(ids):
                ids = ids[(mask[-len(ids) :] if part == "response" else mask[: len(ids)]).bool()]
        ids = ids.tolist()
        return str(ids) if self._tokenizer is None else str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _plain(value: Any) -> Any:
    """Return a leaf as plain Python."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return getattr(value, "data", value)


def _reward(row: TensorDictBase) -> float | None:
    """The sum over a row's entries: one, or one for each token."""
    reward = row.get(("next", "reward"), None)
    return None if reward is None else float(reward.sum())


def _cell(value: Any) -> str:
    if value is None:
        return ABSENT
    return f"{value:.4g}" if isinstance(value, float) else one_line(str(value), 40)


def _span(versions: torch.Tensor) -> str:
    if not len(versions):
        return ABSENT
    low, high = int(versions.min()), int(versions.max())
    return f"{low}" if low == high else f"{low} to {high}"
