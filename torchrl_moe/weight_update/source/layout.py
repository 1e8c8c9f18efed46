"""The contents of a version: names, dtypes and shapes, and the tensors one by one, from any source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from torchrl_moe._errors import ManifestMismatch
from torchrl_moe.modules.policies.adapters import whole
from torchrl_moe.modules.policies.unstack import ModelWeights, check_dense
from torchrl_moe.weight_update.metadata import trained_model
from torchrl_moe.weight_update.store.flat import send
from torchrl_moe.weight_update.store.manifest import TensorKind

__all__ = ["Dtypes", "Kinds", "Source", "Weights", "cast_kinds", "contents", "source_of"]

Kinds = Mapping[str, TensorKind]
Weights = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Dtypes = Sequence[torch.dtype | None]
"""Dtypes of tensors that are read one after another; ``None``: the tensor's own."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class Source:
    """Weights that can be sent.

    Attributes:
        kinds: checkpoint name -> (dtype, shape).
        tensors: yields names and tensors; reading a sharded one is a collective. It takes what ``gathered_in`` returned
            on rank 0: the dtype to which each rank casts its part first.
        is_sharded: whether a tensor is sharded over ranks.
        changes: returns a digest of what the tensors hold: another one means that they were written to.
        gathered_in: given the kinds in which tensors are written, returns the dtypes in which they may be gathered, in
            order.
    """

    kinds: Kinds
    tensors: Callable[..., Iterator[tuple[str, Tensor]]]
    is_sharded: bool = False
    changes: Callable[[], str] = str
    gathered_in: Callable[[Kinds], Dtypes] = lambda _: ()


def source_of(weights: Weights | None, model: ModelWeights | None, expected: Kinds | None) -> Source:
    """Return the source for the arguments of an update.

    Args:
        weights: a model, or tensors: with checkpoint names, or with the registered model's own, stacked ones.
        model: the registered model, which is sent if there are no ``weights``.
        expected: the engine's tensors, if they are known.

    Raises:
        RuntimeError: neither weights nor a model.
        TypeError: weights are neither a model nor names and tensors.
        ManifestMismatch: a name comes twice, or what comes is no dense tensor, or tensors under the model's own names
            are not like the model's.
    """
    if isinstance(weights, nn.Module):
        model = ModelWeights(trained_model(weights), expected or ())
        weights = None
    if weights is None:
        if model is None:
            raise RuntimeError("publish: no model; call register_model(model) first, or pass weights")
        own = model
        own.check()
        return Source(
            own.kinds,
            lambda dtypes=(): own.tensors(None, dtypes),
            own.is_sharded,
            lambda: contents(own.state()),
            own.gathered_in,
        )
    named = _named(weights)
    is_sharded = any(hasattr(tensor, "full_tensor") for tensor in named.values())

    def changes() -> str:
        return contents(named.values())

    if model is not None and _has_own_names(named, model, expected, is_sharded):
        model.check(named)
        read = model.tensors
        return Source(model.kinds, lambda dtypes=(): read(named, dtypes), is_sharded, changes, model.gathered_in)
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in named.items()}

    def tensors(dtypes: Dtypes = ()) -> Iterator[tuple[str, Tensor]]:
        for (name, tensor), dtype in zip(named.items(), chain(dtypes, repeat(None)), strict=False):
            yield name, whole(tensor.detach(), dtype)

    return Source(kinds, tensors, is_sharded, changes, lambda written: [written[name][0] for name in named])


def _has_own_names(named: Mapping[str, Tensor], model: ModelWeights, expected: Kinds | None, is_sharded: bool) -> bool:
    """Whether tensors come under the model's own names: all of those, or one that no checkpoint has.

    Sharded ones always do, if they have all: ranks without the engine do not know ``expected``.
    """
    checkpoint = set(expected or model.kinds)
    if model.keys <= set(named):
        return is_sharded or set(named) != checkpoint
    return not (model.keys - checkpoint).isdisjoint(named)


def _named(weights: Any) -> dict[str, Tensor]:
    flatten: Any = getattr(weights, "flatten_keys", None)  # of a TensorDict
    if flatten is not None:
        weights = dict(flatten(".").items())
    pairs = list(weights.items()) if isinstance(weights, Mapping) else weights
    if isinstance(pairs, Iterable) and not isinstance(pairs, str | bytes | Tensor):
        pairs = list(pairs)
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            f"weights must be a model, a TensorDict, or names and tensors, got {type(weights).__name__}: pass "
            "model.state_dict(), or pairs of a name and a tensor"
        )
    for name, tensor in pairs:
        check_dense(name, tensor)
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ManifestMismatch("the weights name a tensor twice")
    return named


def contents(tensors: Iterable[Tensor]) -> str:
    """Return a digest of what tensors hold; a write through ``.data`` or numpy changes it too, which torch counts not.

    Those of a GPU are summed there, as integers.
    """
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if tensor.is_cpu:
            found = send(tensor, tensor.dtype, len)
        else:
            found = str(int(tensor.detach().reshape(-1).view(INTEGERS[tensor.dtype.itemsize]).sum()))
        digest.update(f"{tensor._version} {found};".encode())
    return str(digest.hexdigest())


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
