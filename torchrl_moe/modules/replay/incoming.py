"""Incoming routes: read in the layout of the batch, and checked once, before a forward pass may use them.

In any layout, the rows of the real tokens are checked as one list, sample after sample, so a message names the same
sample and token for a padded, a packed and a jagged batch.

Letters: B sequences, T tokens, M real tokens of all sequences, N = B * T rows, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_moe import _checks
from torchrl_moe._errors import RouteShapeError, RouteValueError
from torchrl_moe.modules.replay.binding import UNSET, Binding, live_rows
from torchrl_moe.modules.replay.discovery import RouterSite

__all__ = ["ON_BAD_ROUTES", "OnBadRoutes", "Packing", "bind_routes"]

OnBadRoutes = Literal["raise", "live"]
ON_BAD_ROUTES: tuple[OnBadRoutes, ...] = ("raise", "live")

_BATCH = "Routes are laid out as the batch; L counts all decoder layers, dense ones too."
_ENGINE = "For what an engine returned, RoutedExperts.from_vllm."


@dataclass(frozen=True, slots=True)
class Packing:
    """The positions of a batch's tokens in a model's input, which may hold several sequences in a row.

    Args:
        index: int64 ``[B, T]``, the position of each real token in the flattened input.
        shape: of the input, ``(R, W)``.
    """

    index: Tensor
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Incoming:
    """Routes ``[M, L, K]`` of the real tokens, and their positions in the model's input.

    Args:
        rows: in memory that nothing else uses.
        lengths: real tokens of each sample.
        shape: of the input, ``(B, T)`` or, packed, ``(R, W)``.
        places: positions of the rows in the flattened input: bool ``[N]`` or int64 ``[M]``; ``None`` if it holds
            nothing else.
    """

    rows: Tensor
    lengths: Sequence[int]
    shape: tuple[int, int]
    places: Tensor | None

    def laid_out(self) -> Tensor:
        """Return ``[N, L, K]``, -1 on pads."""
        if self.places is None:
            return self.rows
        flat = self.rows.new_full((self.shape[0] * self.shape[1], *self.rows.shape[1:]), UNSET)
        flat[self.places] = self.rows
        return flat


def bind_routes(
    routes: Any,
    sites: Sequence[RouterSite],
    num_layers: int,
    *,
    attention_mask: Tensor | None = None,
    measure: bool = False,
    on_bad_routes: OnBadRoutes = "raise",
    device: torch.device | None = None,
    packing: Packing | None = None,
) -> Binding:
    """Check routes and bind them to one forward pass; see :meth:`RouterReplay.replay`."""
    if on_bad_routes not in ON_BAD_ROUTES:
        raise ValueError(f"on_bad_routes must be one of {ON_BAD_ROUTES}, got {on_bad_routes!r}")
    incoming = _read(routes, attention_mask, (num_layers, max(site.top_k for site in sites)), device)
    if packing is not None:
        incoming = _packed(incoming, packing)
    refused = _check_values(incoming, sites, on_bad_routes)
    flat = incoming.laid_out()
    known = flat[..., 0] != UNSET
    replayed = tuple(known.sum(0).tolist())
    layers = [site.layer for site in sites]
    return Binding(
        layers=tuple(layers),
        routes=flat,
        shape=incoming.shape,
        known=known,
        replayed=replayed,
        complete=tuple(count == len(flat) for count in replayed),
        live=live_rows(known, layers),
        refused=refused,
        refused_rows=sum(incoming.lengths[i] for i in refused),
        measure=measure,
    )


def _read(routes: Any, mask: Tensor | None, tail: tuple[int, int], device: torch.device | None) -> _Incoming:
    """Check everything but the ids, and concatenate the rows."""
    given = _tensor(routes)
    _checks.check_integer("routes", given, signed=True, error=RouteValueError, hint=_ENGINE)
    if given.is_nested:
        return _read_jagged(given.detach().unbind(), mask, tail, device or given.device)
    _checks.check_shape("routes", given.shape, ("B", "T", *tail), error=RouteShapeError, hint=_BATCH)
    batch, length = given.shape[:2]
    rows = given.detach().flatten(0, 1)
    if mask is None:
        return _Incoming(rows.to(device or given.device, copy=True), [length] * batch, (batch, length), None)
    hint = "It is that of the batch, [B, T]."
    _checks.check_shape("attention_mask", mask.shape, (batch, length), error=RouteShapeError, hint=hint)
    keep = mask.bool().flatten()
    rows = rows[keep.to(given.device)].to(device or given.device)
    return _Incoming(rows, mask.bool().sum(1).tolist(), (batch, length), keep.to(rows.device))


def _packed(incoming: _Incoming, packing: Packing) -> _Incoming:
    """Return the same rows, for an input with other token positions."""
    shape = incoming.shape
    hint = "A place for each token of [B, T]."
    _checks.check_shape("packing.index", packing.index.shape, shape, error=RouteShapeError, hint=hint)
    if packing.index.dtype != torch.int64:
        raise RouteValueError(f"packing.index must have dtype torch.int64, got {packing.index.dtype}")
    places = packing.index.flatten().to(incoming.rows.device)
    places = places if incoming.places is None else places[incoming.places]
    _check_places(places, packing.shape)
    return replace(incoming, shape=packing.shape, places=places)


def _check_places(places: Tensor, shape: tuple[int, int]) -> None:
    """Check that real tokens have positions inside the input, each a different one."""
    ordered = places.sort().values
    wrong = (ordered < 0) | (ordered >= shape[0] * shape[1])
    wrong[1:] |= ordered[1:] == ordered[:-1]
    if bool(wrong.any()):
        raise RouteValueError(
            f"packing.index holds {int(ordered[wrong][0])}, which is out of range or there twice; the places of real "
            f"tokens are distinct, from 0 to {shape[0] * shape[1] - 1} for an input of {list(shape)}. Give the "
            "attention_mask if some are placeholders of pads."
        )


def _read_jagged(
    samples: Sequence[Tensor], mask: Tensor | None, tail: tuple[int, int], device: torch.device
) -> _Incoming:
    for i, sample in enumerate(samples):
        _checks.check_shape(f"routes of sample {i}", sample.shape, ("T", *tail), error=RouteShapeError, hint=_BATCH)
    rows, lengths = torch.cat(list(samples)).to(device), [len(sample) for sample in samples]
    if mask is None:
        return _Incoming(rows, lengths, (1, len(rows)), None)
    _checks.check_shape("attention_mask", mask.shape, (len(lengths), "T"), error=RouteShapeError)
    for i, (got, wanted) in enumerate(zip(lengths, mask.bool().sum(1).tolist(), strict=True)):
        hint = "A row for each token that attention_mask keeps."
        _checks.check_rows(f"routes of sample {i}", got, wanted, hint=hint)
    return _Incoming(rows, lengths, (mask.shape[0], mask.shape[1]), mask.bool().flatten().to(device))


def _tensor(routes: Any) -> Tensor:
    full = getattr(routes, "full", routes)
    try:
        given = torch.as_tensor(full.copy() if isinstance(full, np.ndarray) else full)  # it may be read-only
    except (TypeError, ValueError, RuntimeError) as error:
        raise RouteValueError(f"routes must be a tensor of integers, got {type(routes).__name__}: {error}") from error
    if given.layout is not (torch.jagged if given.is_nested else torch.strided):
        raise RouteValueError(f"routes must be dense or nested jagged, got layout {given.layout}")
    return given


def _check_values(incoming: _Incoming, sites: Sequence[RouterSite], on_bad_routes: OnBadRoutes) -> tuple[int, ...]:
    """Check every id; return the refused samples, whose rows are set to -1.

    Layers with another E or K are checked separately, and a smaller K leaves trailing -1.
    """
    rows, lengths = incoming.rows, incoming.lengths
    names = _checks.RowNames((len(lengths),), lengths)
    bad = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    kinds = sorted({(site.num_experts, site.top_k) for site in sites})
    for num_experts, top_k in kinds:
        layers = [site.layer for site in sites if (site.num_experts, site.top_k) == (num_experts, top_k)]
        part = rows[..., :top_k]
        if len(kinds) > 1:
            others = [site.layer for site in sites if site.layer not in layers]
            part = part.index_fill(1, torch.tensor(others, device=rows.device), UNSET)
        surplus = (rows[:, layers, top_k:] != UNSET).any(-1)
        if on_bad_routes == "live":
            bad |= _checks.find_bad_routes(part, layers, num_experts) | surplus.any(-1)
            continue
        _checks.check_routes(part, layers, num_experts, where=names.row)
        if bool(surplus.any()):
            row, i = surplus.nonzero()[0].tolist()
            raise RouteValueError(
                f"routed_experts: {names.row(row)}, layer {layers[i]} holds {rows[row, layers[i]].tolist()}; its "
                f"router chooses {top_k} experts, so columns {top_k} and up must be -1"
            )
    if not bool(bad.any()):
        return ()
    sample_of = torch.repeat_interleave(torch.tensor(lengths, device=rows.device))
    samples = sample_of[bad].unique()
    rows[torch.isin(sample_of, samples)] = UNSET
    return tuple(samples.tolist())
