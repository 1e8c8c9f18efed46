"""What a model's routers look like, as plain data: layers, top-k, experts.

A :class:`RoutingLayout` is sent to engine processes and used by the checks of routes; it holds no tensor and no model.
The code that loads a model derives it. A dense model has no layout: use ``None``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

if TYPE_CHECKING:
    import torch

UNSET_EXPERT = -1
"""Marks an unknown route. Expert 0 is a real expert, so zero never means missing."""
MOST_LAYERS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingLayout:
    """The routers of one model.

    Raises:
        TypeError: a field does not hold integers.
        ValueError: a field is out of its range, or ``moe_layers`` is empty, unsorted or has repeats.

    >>> layout = RoutingLayout(num_layers=4, moe_layers=(1, 2, 3), top_k=2, num_experts=128)
    >>> layout.dense_layers, layout.dtype
    ((0,), torch.int8)
    """

    num_layers: int
    """L: all decoder layers, those without a router included."""
    moe_layers: tuple[int, ...]
    """Global indices of the layers that have a router, ascending. Any iterable of ints is accepted."""
    top_k: int
    """K: experts per token."""
    num_experts: int
    """E: routed experts per layer; shared experts do not count."""
    dense_layers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Global indices of the layers without a router, ascending; derived."""

    def __post_init__(self) -> None:
        # Integers first, of any kind that has an index: a config may give numpy's.
        for name in ("num_layers", "top_k", "num_experts"):
            object.__setattr__(self, name, _index(name, getattr(self, name)))
        if isinstance(self.moe_layers, str | bytes) or not isinstance(self.moe_layers, Iterable):
            raise TypeError(f"moe_layers must be a sequence of integers, got {self.moe_layers!r}.")
        layers = tuple(_index("moe_layers", layer) for layer in self.moe_layers)
        object.__setattr__(self, "moe_layers", layers)
        # Then their ranges.
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {self.num_layers}.")
        if self.num_layers > MOST_LAYERS:
            raise ValueError(f"num_layers must be at most {MOST_LAYERS}, got {self.num_layers}.")
        if not layers:
            raise ValueError("moe_layers is empty; a dense model has no layout: pass None in place of a RoutingLayout.")
        if list(layers) != sorted(set(layers)):
            raise ValueError(f"moe_layers must ascend without repeats, got {layers}; pass tuple(sorted(set(layers))).")
        if layers[0] < 0 or layers[-1] >= self.num_layers:
            raise ValueError(
                f"moe_layers must lie in 0..{self.num_layers - 1}, got {layers}: indices count dense layers."
            )
        largest = int(np.iinfo(np.int16).max) + 1
        if not 1 <= self.num_experts <= largest:
            raise ValueError(f"num_experts must lie in 1..{largest}, got {self.num_experts}; ids are kept as int16.")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must lie in 1..num_experts = 1..{self.num_experts}, got {self.top_k}.")
        object.__setattr__(self, "dense_layers", tuple(sorted(set(range(self.num_layers)) - set(layers))))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of routes: int8 up to 128 experts (ids 0..127), else int16."""
        return routes_dtype(self.num_experts)

    @property
    def numpy_dtype(self) -> np.dtype[np.integer]:
        """:attr:`dtype` for numpy."""
        return np.dtype(np.int8) if self.num_experts <= 128 else np.dtype(np.int16)


def routes_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of routes over so many experts."""
    # Not at the top: processes that only pass a layout on do not import torch.
    import torch

    return torch.int8 if num_experts <= 128 else torch.int16


def _index(name: str, value: SupportsIndex) -> int:
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return index(value)
    raise TypeError(f"{name} must hold integers, got {value!r}.")
