"""The contents of a version: names, dtypes and shapes, and the tensors one by one, from any source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_moe._errors import ManifestMismatch
from torchrl_moe.modules.policies.adapters import whole
from torchrl_moe.modules.policies.unstack import ModelWeights
from torchrl_moe.weight_update.metadata import trained_model
from torchrl_moe.weight_update.store.manifest import TensorKind

__all__ = ["Dtypes", "Kinds", "Source", "Weights", "cast_kinds", "source_of"]

Kinds = Mapping[str, TensorKind]
Weights = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Dtypes = Sequence[torch.dtype | None]
"""Dtypes of tensors that are read one after another; ``None``: the tensor's own."""


@dataclass(frozen=True, slots=True)
class Source:
    """Weights that can be sent.

    Attributes:
        kinds: checkpoint name -> (dtype, shape).
        tensors: yields names and tensors; reading a sharded one is a collective. It takes what ``gathered_in`` returned
            on rank 0: the dtype to which each rank casts its part first.
        is_sharded: whether a tensor is sharded over ranks.
        changes: counts in-place changes to the tensors.
        gathered_in: given the kinds in which tensors are written, returns the dtypes in which they may be gathered, in
            order.
    """

    kinds: Kinds
    tensors: Callable[..., Iterator[tuple[str, Tensor]]]
    is_sharded: bool = False
    changes: Callable[[], int] = int
    gathered_in: Callable[[Kinds], Dtypes] = lambda _: ()


def source_of(weights: Weights | None, model: ModelWeights | None, expected: Kinds | None) -> Source:
    """Return the source for the arguments of an update.

    Args:
        weights: a model, or tensors: with checkpoint names, or with the registered model's own, stacked ones.
        model: the registered model, which is sent if there are no ``weights``.
        expected: the engine's tensors, if they are known.

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
        own = model
        return Source(
            own.kinds, lambda dtypes=(): own.tensors(None, dtypes), own.is_sharded, own.changes, own.gathered_in
        )
    named = _named(weights)
    is_sharded = any(hasattr(tensor, "full_tensor") for tensor in named.values())

    def changes() -> int:
        return sum(tensor._version for tensor in named.values())

    # sharded tensors always take the model's names, if there is one: ranks without the engine do not know ``expected``
    if model is not None and model.keys <= set(named) and (is_sharded or set(named) != set(expected or model.kinds)):
        read = model.tensors
        return Source(model.kinds, lambda dtypes=(): read(named, dtypes), is_sharded, changes, model.gathered_in)
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in named.items()}

    def tensors(dtypes: Dtypes = ()) -> Iterator[tuple[str, Tensor]]:
        for (name, tensor), dtype in zip(named.items(), chain(dtypes, repeat(None)), strict=False):
            yield name, whole(tensor.detach(), dtype)

    return Source(kinds, tensors, is_sharded, changes, lambda written: [written[name][0] for name in named])


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
    """Return the dtypes and shapes in which tensors are written.

    Args:
        kinds: their own.
        dtype: see :class:`~torchrl_moe.weight_update.options.SourceOptions`.
        expected: of the engine's checkpoint.
        engine_dtype: the one that the engine computes in; ``None`` if it is not known.
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
