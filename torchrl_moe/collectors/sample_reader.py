"""Reads rewards, tokens, texts and versions from the rows of a batch, of any collector and input mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_moe.render.text_tables import one_line
from torchrl_moe.render.token_sample import rows_of

__all__ = ["SampleReader"]

ABSENT = "–"


class SampleReader:
    """Reads rows; a missing value is shown as ``–``.

    Args:
        policy: names the keys (default: TorchRL's keys), and has the tokenizer for rows without texts.
    """

    COLUMNS = ("group", "prompt", "answer", "reward", "tokens", "version", "segments", "finish_reason")
    WIDE = ("prompt", "answer")
    """Columns of long text."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._text, self._tokens, self._masks = (
            getattr(policy, f"{name}_key", None) or name for name in ("text", "tokens", "masks")
        )
        self._tokenizer = getattr(policy, "tokenizer", None)

    def metrics(self, batch: TensorDictBase) -> dict[str, int | float]:
        """Return the numbers of rows, groups and generated tokens, and mean and standard deviation of the rewards.

        The deviation is the population's (divided by the number of rows). NaN if no row has a reward.
        """
        rows = rows_of(batch)
        is_padded = bool(rows) and self._is_padded(rows[0])  # one policy wrote all of them
        rewards = [reward for row in rows if (reward := _reward(row)) is not None] or [float("nan")]
        groups = {str(group) for row in rows if (group := _plain(row.get("group_id", None))) is not None}
        return {
            "rows": len(rows),
            "groups": len(groups),
            "tokens": sum(self._num_tokens(row, is_padded) for row in rows),
            "reward_mean": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
        }

    def cells(self, row: TensorDictBase, characters: int) -> tuple[str, ...]:
        """Return the texts of :attr:`COLUMNS` of a row, batch size ``[]``; prompts and answers are cut."""
        versions = row.get(("policy_versions", "full"), None)
        versions = None if versions is None else versions[versions >= 0]
        return (
            _cell(_plain(row.get("group_id", None))),
            *(one_line(self._part(row, part), characters) for part in ("prompt", "response")),
            _cell(_reward(row)),
            _cell(self._num_tokens(row, self._is_padded(row))),
            _cell(_plain(row.get("policy_version", None))) if versions is None else _span(versions),
            _cell(_plain(row.get("num_segments", None))),
            _cell(_plain(row.get("finish_reason", None))),
        )

    def _is_padded(self, row: TensorDictBase) -> bool:
        return bool(getattr(row.get(self._tokens, None), "padded", False))

    def _num_tokens(self, row: TensorDictBase, is_padded: bool) -> int:
        """How many tokens were generated."""
        ids = self._ids(row, "response", is_padded)
        return 0 if ids is None else len(ids)

    def _ids(self, row: TensorDictBase, part: str, is_padded: bool) -> torch.Tensor | None:
        """Return the ids of the prompt or the response, padding left out."""
        ids = row.get((self._tokens, part), None)
        if ids is None or not is_padded:
            return ids
        mask = row.get((self._masks, "all_attention_mask")).bool()
        return ids[mask[: len(ids)] if part == "prompt" else mask[len(mask) - len(ids) :]]

    def _part(self, row: TensorDictBase, part: str) -> str:
        """Return the prompt or the response as text; in token mode it is decoded here."""
        text = _plain(row.get((self._text, part), None))
        if text is not None:
            return str(text)
        ids = self._ids(row, part, self._is_padded(row))
        if ids is None:
            return ABSENT
        if self._tokenizer is None:
            return str(ids.tolist())
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _plain(value: Any) -> Any:
    """Return a leaf as plain Python."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return getattr(value, "data", value)


def _reward(row: TensorDictBase) -> float | None:
    """The sum over a row's entries: a single one, or one per token."""
    reward = row.get(("next", "reward"), None)
    return float(reward.sum()) if isinstance(reward, torch.Tensor) else None


def _cell(value: Any) -> str:
    if value is None:
        return ABSENT
    return f"{value:.4g}" if isinstance(value, float) else one_line(str(value), 40)


def _span(versions: torch.Tensor) -> str:
    if not len(versions):
        return ABSENT
    low, high = int(versions.min()), int(versions.max())
    return f"{low}" if low == high else f"{low} to {high}"
