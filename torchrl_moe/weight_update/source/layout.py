"""The contents of a version: names, dtypes and shapes, and the tensors one by one, from any source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_moe._errors import ManifestMismatch
from torchrl_moe.modules.policies.adapters import whole
from torchrl_moe.modules.policies.unstack import ModelWeights
from torchrl_moe.weight_update.metadata import trained_model
from torchrl_moe.weight_update.store.manifest import TensorKind

__all__ = ["Kinds", "Source", "Weights", "cast_kinds", "source_of"]

Kinds = Mapping[str, TensorKind]
Weights = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Source:
    """Weights that can be sent.

    Attributes:
        kinds: checkpoint name -> (dtype, shape).
        tensors: yields names and tensors; reading a sharded one is a collective.
        is_sharded: whether a tensor is sharded over ranks.
        changes: counts in-place changes to the tensors.
    """

    kinds: Kinds
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    is_sharded: bool = False
    changes: Callable[[], int] = int


def source_of(weights: Weights | None, model: ModelWeights | None, expected: Kinds | None) -> Source:
    """Return the source for the arguments of an update.

    Args:
        weights: a model, or tensors: with checkpoint names, or with the registered model's own, stacked ones.
        model: the registered model, which is sent if there are no ``weights``.
        expected: what the engine has, if it is known.

    Raises:
        RuntimeError: neither weights nor a model.
        ManifestMismatch: a name comes twice.
    """
    if isinstance(weights, nn.Module):
        model = ModelWeights(trained_model(weights), expected or ())
        weights = None
    if weights is None:
        if model is None:
            raise RuntimeError("publish: no model; call register_model(model) first, or pass weights")
        return Source(model.kinds, model.tensors, model.is_sharded, model.changes)
    named = _named(weights)
    is_sharded = any(hasattr(tensor, "full_tensor") for tensor in named.values())

    def changes() -> int:
        return sum(tensor._version for tensor in named.values())

    # sharded tensors always go by the model, if there is one: ranks without the engine know nothing of ``expected``
    if model is not None and model.keys <= set(named) and (is_sharded or set(named) != set(expected or model.kinds)):
        return Source(model.kinds, lambda: model.tensors(named), is_sharded, changes)
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in named.items()}
    return Source(kinds, lambda: ((name, whole(tensor)) for name, tensor in named.items()), is_sharded, changes)


def _named(weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    flatten: Any = getattr(weights, "flatten_keys", None)  # of a TensorDict
    if flatten is not None:
        weights = dict(flatten(".").items())
    pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ManifestMismatch("the weights name a tensor twice")
    return named


def cast_kinds(
    kinds: Kinds, dtype: str | torch.dtype, expected: Kinds | None, engine_dtype: torch.dtype | None
) -> dict[str, TensorKind]:
    """Return what tensors are written as.

    Args:
        kinds: what they are.
        dtype: see :class:`~torchrl_moe.weight_update.options.SourceOptions`.
        expected: of the engine's checkpoint.
        engine_dtype: that the engine computes in; ``None`` if it is not known.
    """
    cast = {}
    for name, (own, shape) in kinds.items():
        target = own
        if isinstance(dtype, torch.dtype):
            target = dtype
        elif dtype == "engine" and expected is not None and engine_dtype is not None and name in expected:
            target = _widest(engine_dtype, expected[name][0])
        # the engine may keep a tensor in its checkpoint's wider dtype; a narrower one is cast there
        narrows = own.is_floating_point and target.is_floating_point and target.itemsize < own.itemsize
        cast[name] = (target if narrows or (isinstance(dtype, torch.dtype) and own.is_floating_point) else own, shape)
    return cast


def _widest(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    if one.itemsize == 1 or other.itemsize == 1:  # quantised: torch promotes none of them
        return max(one, other, key=lambda dtype: dtype.itemsize)
    return torch.promote_types(one, other)
