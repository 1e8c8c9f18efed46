"""One sequence by hand, and a way to run a function over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")
Run = Callable[[Callable[..., Any]], Callable[..., Any]]


def row(*values: float) -> Tensor:
    """One sequence, float64."""
    return torch.tensor([values], dtype=torch.float64)


def every(width: int) -> Tensor:
    """A mask of one sequence that selects all tokens."""
    return torch.ones(1, width, dtype=torch.bool)
