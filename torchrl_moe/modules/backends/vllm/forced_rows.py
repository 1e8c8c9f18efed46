"""The experts that a request follows, on their way to the workers: inside the request's ``SamplingParams``.

vLLM hands ``extra_args`` on as they are, from its frontend to scheduler and workers, and drops them with the request.

Letters: P prompt tokens, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchrl_moe import _checks
from torchrl_moe._errors import RouteShapeError, RouteValueError
from torchrl_moe.data import UNSET_EXPERT, RoutingLayout

__all__ = ["Forced", "attach", "check_rows", "forced_in", "forced_of", "rows_of_answer"]

KEY = "torchrl_moe"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forced:
    """What a request follows.

    Attributes:
        rows: int8 or int16 ``[rows, L, K]`` for its first positions, -1 where the router chooses; ``None`` for none.
        is_live: whether the router chooses again where the engine reads tokens again by itself.
        is_recorded: whether the rows are all that was recorded of an answer's tokens, and not a user's.
    """

    rows: NDArray[np.integer[Any]] | None = None
    is_live: bool = False
    is_recorded: bool = False


NOTHING = Forced()


def attach(params: Any, forced: Forced) -> Any:
    """Return vLLM's ``SamplingParams`` with what the request follows in them."""
    if forced.rows is None and not forced.is_live:
        return params
    packed: dict[str, Any] = {"live": forced.is_live}
    if forced.rows is not None:
        packed |= {"rows": forced.rows.tobytes(), "dtype": forced.rows.dtype.str, "shape": list(forced.rows.shape)}
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), KEY: packed}
    return params


def forced_in(params: Any) -> Forced:
    """Return what :func:`attach` put into ``SamplingParams``; the rows are the same memory."""
    packed: Mapping[str, Any] | None = ((params and params.extra_args) or {}).get(KEY)
    if packed is None:
        return NOTHING
    rows = None
    if "rows" in packed:
        rows = np.frombuffer(packed["rows"], packed["dtype"]).reshape(packed["shape"])
    return Forced(rows=rows, is_live=packed["live"])


def forced_of(request: Any) -> Forced:
    """Return what a request of vLLM's scheduler follows; looked up once."""
    forced: Forced | None = getattr(request, "torchrl_moe_forced", None)
    if forced is None:
        forced = request.torchrl_moe_forced = forced_in(request.sampling_params)
    return forced


def rows_of_answer(rows: NDArray[Any], layout: RoutingLayout) -> NDArray[np.integer[Any]]:
    """Return what an engine recorded ``[rows, L, K]`` as rows to follow: layers without a router are -1."""
    followed = rows.astype(layout.numpy_dtype)
    if layout.dense_layers:
        followed[:, layout.dense_layers] = UNSET_EXPERT
    return followed


def check_rows(rows: NDArray[Any], prompt_tokens: int, layout: RoutingLayout) -> NDArray[np.integer[Any]]:
    """Return rows to follow in the layout's dtype, checked.

    Args:
        rows: signed integers ``[rows, L, K]`` for the first positions of a prompt.
        prompt_tokens: P.
        layout: the engine's routers.

    Raises:
        RouteShapeError: wrong rank, layers or width, or more rows than the prompt has tokens.
        RouteValueError: not signed integers, or a row that is partly -1, holds an id outside ``-1..E-1`` or one twice,
            is all zeros (K >= 2), or is set on a layer without a router.
    """
    name = "routed_experts"
    _checks.check_integer(
        name, rows, signed=True, error=RouteValueError, hint="For what an engine returned, RoutedExperts.from_vllm."
    )
    tail = (layout.num_layers, layout.top_k)
    _checks.check_shape(name, rows.shape, ("rows", *tail), error=RouteShapeError, hint="L counts dense layers, too.")
    if len(rows) > prompt_tokens:
        raise RouteShapeError(f"{name} must have at most a row per prompt token, {prompt_tokens}, got {len(rows)}.")
    given = torch.from_numpy(np.array(rows))  # a copy: it may be read-only
    _checks.check_routes(given, layout.moe_layers, layout.num_experts, where="token {}".format)
    return rows.astype(layout.numpy_dtype)
