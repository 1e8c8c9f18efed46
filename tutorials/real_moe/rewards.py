"""Rewards of the runs in docs/trainer.md#a-real-model, besides the task's own score."""

from __future__ import annotations

import re


def even(completion: str) -> float:
    """1 if the last number of an answer is even: a reward that a model reaches without knowing sums."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) % 2 == 0)
