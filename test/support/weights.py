"""Weights that are sent to fakes, and failures that these report."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrl_moe.testing.fake_weights import FakeFleet, SoftError
from torchrl_moe.weight_update.sender import VLLMWeightSender

Connect = Callable[..., VLLMWeightSender]


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {"a": torch.full((2, 2), float(value)), "b": torch.full((3,), int(value))}


def value_in(engine: FakeFleet, index: int) -> float | None:
    """Of the weights that a replica has."""
    held = engine.fakes[index].weights
    return held["a"][0, 0].item() if held else None


def soft(*times: int) -> Callable[[int], Exception | None]:
    """Fail softly the given times (0 is the first)."""
    return lambda asked: SoftError("it went wrong") if asked in times else None


def always(error: Exception) -> Callable[[int], Exception]:
    return lambda asked: error
