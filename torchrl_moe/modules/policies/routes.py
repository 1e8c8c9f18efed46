"""The routes of a scoring pass: read sample by sample for a replay, counted, and written back after a recording.

Letters: B sequences, T tokens of the longest, N all tokens, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_moe import _checks
from torchrl_moe._errors import ReplayError, RouteShapeError, RouteValueError, RoutingError
from torchrl_moe.data import UNSET_EXPERT, RoutedExperts
from torchrl_moe.modules.policies.scoring import ScoringBatch, pad_left, samples_of
from torchrl_moe.modules.replay.incoming import OnBadRoutes

__all__ = ["RECORDED", "UNUSED", "has_recorded", "no_routes", "note_routing", "read_routes", "write_recorded"]

RECORDED = "train_routed_experts"
UNUSED = (
    "the batch has the experts that an engine recorded, and replay='none' trains on those of the live router: pass "
    "replay='R3' to follow them, or record none, vLLMWrapper(return_routed_experts=False)"
)
REMEDIES = {
    "R3": "start the engine with route capture and keep the routes (vLLMWrapper(return_routed_experts=True)), or pass "
    "replay='none'",
    "R2": "score the batch once under torch.no_grad() to record it",
}
NO_ROUTES = UNSET_EXPERT - 1  # for routes that do not fit a sample: the check of ids refuses it


def read_routes(
    td: TensorDictBase, key: Any, batch: ScoringBatch, tail: tuple[int, int], on_bad_routes: OnBadRoutes
) -> Tensor | None:
    """Read the routes of a dense, a lazily stacked or a nested batch as ``[B, T, L, K]``, -1 where rows were added.

    Args:
        td: batch size ``[B]``.
        key: of the routes.
        batch: the tokens that they are for.
        tail: ``(L, K)``.
        on_bad_routes: with ``"live"``, a sample without routes, or with routes of another shape or dtype, is passed on,
            marked so that :meth:`RouterReplay.replay` refuses it; its ids are not checked here.

    Returns:
        The routes, or ``None`` if a sample has none (``"live"``: if no sample has any).

    Raises:
        RoutingError: a sample's routes do not fit its tokens or the model.
    """
    rows = samples_of(td, key)
    if rows is None and on_bad_routes == "live":  # a stack has no entry that one sample lacks
        rows = [sample.get(key, None) for sample in td.unbind(0)]
    if rows is None or all(row is None for row in rows):
        return None
    fitting: list[Tensor] = []
    for i, (row, length) in enumerate(zip(rows, batch.lengths, strict=True)):
        if row is None and on_bad_routes == "raise":
            return None
        try:
            fitting.append(_checked(f"{key!r} of sample {i}", row, length, tail))
        except RoutingError:
            if on_bad_routes == "raise":
                raise
            fitting.append(torch.full((length, *tail), NO_ROUTES, dtype=torch.int8))
    dtype = reduce(torch.promote_types, (row.dtype for row in fitting))  # samples may be int8 or int16
    return pad_left([row.to(batch.ids.device, dtype) for row in fitting], UNSET_EXPERT)


def _checked(name: str, row: Tensor | None, length: int, tail: tuple[int, int]) -> Tensor:
    if row is None:
        raise ReplayError(f"{name} is missing")
    if len(row) != length:
        raise ReplayError(
            f"{name} has {len(row)} rows, its tokens are {length}: both must have been cut or padded alike"
        )
    hint = "L counts all decoder layers of the replaying model, dense ones too."
    _checks.check_shape(name, row.shape, ("T", *tail), error=RouteShapeError, hint=hint)
    _checks.check_integer(name, row, signed=True, error=RouteValueError)
    return row


def no_routes(replay: Literal["R3", "R2"], key: Any) -> ReplayError:
    """Return the error for a batch without the routes that ``replay`` needs."""
    return ReplayError(f"replay={replay!r} needs {key!r} in every sample, and the input lacks it: {REMEDIES[replay]}")


def note_routing(
    td: TensorDictBase,
    batch: ScoringBatch,
    routes: Tensor,
    report: Mapping[int, Mapping[str, Any]],
    refused: Collection[int],
) -> None:
    """Write how many tokens ran on live routing, and in which share of rows the live router agrees.

    Args:
        td: gets ``("routing", "fallback")`` int64 ``[B]`` and ``("routing", "agreement")`` float32 ``[B, L]``.
        batch: the tokens.
        routes: ``[B, T, L, K]``, what was replayed.
        report: of the forward pass, by layer that has a router.
        refused: samples whose routes were not used.
    """
    live = (routes[:, :, list(report), 0] < 0).any(-1)
    live[list(refused)] = True
    agreement = torch.full((len(routes), routes.shape[2]), float("nan"))
    for layer, figures in report.items():
        if figures["agreement"] is not None:
            agreement[:, layer] = figures["agreement"]
    td.set(("routing", "fallback"), (live & batch.mask).sum(-1).to(td.device or "cpu"))
    td.set(("routing", "agreement"), agreement.to(td.device or "cpu"))


def has_recorded(td: TensorDictBase) -> bool:
    """Return whether the samples have routes that an earlier pass recorded.

    Raises:
        ReplayError: some have and some have not.
    """
    rows = samples_of(td, (RECORDED, "full"))
    if rows is None and isinstance(td, LazyStackedTensorDict):  # a stack has no entry that one sample lacks
        rows = [sample.get((RECORDED, "full"), None) for sample in td.unbind(0)]
    missing = [i for i, row in enumerate(rows or ()) if row is None]
    if missing and rows is not None and len(missing) < len(rows):
        raise ReplayError(
            f"samples {missing[:8]} have no {RECORDED!r}, and others have: score the two apart, or pass rerecord=True"
        )
    return rows is not None and not missing


def write_recorded(td: TensorDictBase, batch: ScoringBatch, routes: Tensor) -> None:
    """Write recorded routes ``[B, T, L, K]``, row by row as long as each sample's own tokens; -1 on its pads."""
    routes = routes.masked_fill(~batch.mask[..., None, None], UNSET_EXPERT).to(td.device or "cpu")
    td.set(RECORDED, lazy_stack([RoutedExperts(full=row) for row in batch.split(routes)]))
