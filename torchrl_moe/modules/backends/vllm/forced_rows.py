"""The experts that a request follows, on their way to the workers: inside the request's ``SamplingParams``.

vLLM passes ``extra_args`` on unchanged, from its frontend to scheduler and workers, and drops them with the request. So
rows need no message of their own, except those of a request that loses its cache and is read again: only the scheduler
has what was recorded since.

.. code-block:: text

    engine process       scheduler (``schedulers.py``)           worker (``forced_routing.py``)
    attach(params) ----> params: rows key the cache blocks ----> params: rows of a new request
                         preempted: keep the recorded rows ----> in the step's message: rows of a resumed request

Letters: P prompt tokens, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.backends.request_routes import RequestRoutes
from torchrl_moe.modules.backends.sampling_fields import OURS
from torchrl_moe.modules.backends.vllm.prompt_scores import scoring_params

__all__ = ["Forced", "attach", "attached", "forced_in", "forced_of"]

KEY = OURS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forced:
    """What a request follows.

    Attributes:
        rows: int8 or int16 ``[rows, L, K]`` for its first positions, -1 where the router chooses; ``None`` for none.
        is_live: whether the router chooses again where the engine reads tokens again by itself.
        is_recorded: whether the rows are all that was recorded for an answer's tokens; false if a user gave them.
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


def attached(params: Any, request: Request, routes: RequestRoutes) -> Any:
    """Return vLLM's ``SamplingParams`` with what a request asks for beyond them: rows to follow, and scores."""
    if request.scoring is not None:
        assert request.prompt_token_ids is not None  # the service makes such requests this way
        params = scoring_params(params, request.scoring, request.prompt_token_ids)
    if routes.why_live:
        return params
    return attach(params, Forced(rows=request.routed_experts, is_live=routes.how(request) == "live"))


def forced_in(params: Any) -> Forced:
    """Return what :func:`attach` put into ``SamplingParams``; the rows share its memory."""
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
