"""Recorded experts in a worker: the routers of a step follow them, row by row; where a row has none, they choose.

A router runs its own code (scoring, bias, groups, normalisation, scaling); only its ``topk`` is answered, as the
trainer's replay does it (:mod:`torchrl_moe.modules.replay.interception`). What vLLM recorded in a step is compared with
what was to be followed, and a difference ends the engine: no answer is delivered that followed something else.

``_compat_routing.drive_routers`` calls, in each step:

.. code-block:: text

    take(rows, params, ended)   each request's rows [rows, L, K], kept until it ends
      |
    begin(spans)                laid out as the step's tokens are: [N, L, K], -1 where the router chooses
      |                         (no token follows a row: nothing of ours runs until the next step)
    route(layer, live)          per router: run its code, answer its topk from the rows
      |
    end(captured)               compare the rows with what vLLM captured; a difference raises

Letters: N tokens of a step, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_moe._errors import ReplayError
from torchrl_moe.data import UNSET_EXPERT
from torchrl_moe.modules.backends.vllm.forced_rows import forced_in
from torchrl_moe.modules.replay.binding import Binding, live_rows
from torchrl_moe.modules.replay.discovery import RouterSite
from torchrl_moe.modules.replay.interception import TopKInterception

__all__ = ["ForcedRouting", "prove"]

PROOF_ROWS = 4


class ForcedRouting:
    """What the requests of a worker follow.

    Args:
        sites: the routers, by decoder layer.
        num_layers: L, those without a router included.
        top_k: K.
    """

    def __init__(self, sites: Mapping[int, RouterSite], num_layers: int, top_k: int) -> None:
        self._sites = sites
        self._num_layers = num_layers
        self._top_k = top_k
        self._rows: dict[str, NDArray[Any]] = {}
        self._step: Binding | None = None

    @property
    def rows(self) -> Mapping[str, NDArray[Any]]:
        """The rows of each request that follows some."""
        return self._rows

    def take(self, rows: Mapping[str, NDArray[Any]], params: Mapping[str, Any], ended: Iterable[str]) -> None:
        """Take what requests follow: those read again come with ``rows``, new ones have them in their ``params``."""
        if self._rows:
            for name in ended:
                self._rows.pop(name, None)
        self._rows.update(rows)
        for name, one in params.items():
            if (given := forced_in(one).rows) is not None:
                self._rows[name] = given

    def begin(self, spans: Sequence[tuple[str, int, int]]) -> bool:
        """Begin a step of these requests: name, position of the first token, number of tokens.

        Returns:
            Whether a token of them follows a row.
        """
        self._step = None
        if any(start < len(self._rows.get(name, ())) for name, start, _ in spans):
            self._step = self._binding(self._laid_out(spans))
        return self._step is not None

    def _laid_out(self, spans: Sequence[tuple[str, int, int]]) -> Tensor:
        """Return int16 ``[N, L, K]``, -1 where a router chooses."""
        total = sum(count for _, _, count in spans)
        routes = np.full((total, self._num_layers, self._top_k), UNSET_EXPERT, np.int16)
        at = 0
        for name, start, count in spans:
            part = self._rows.get(name, routes[:0])[start : start + count]
            routes[at : at + len(part)] = part
            at += count
        return torch.from_numpy(routes)

    def _binding(self, routes: Tensor) -> Binding:
        known = routes[..., 0] != UNSET_EXPERT
        layers = tuple(self._sites)
        return Binding(
            layers=layers,
            routes=routes,
            known=known,
            complete=tuple(known.all(0).tolist()),
            live=live_rows(known, layers),
        )

    def route(self, layer: int, live: Callable[[], Any]) -> Any:
        """Return what a router gives; ``live`` runs its own code."""
        step = self._step
        if step is None or step.known is None or not bool(step.known[:, layer].any()):
            return live()
        site = self._sites[layer]
        choose, groups = partial(step.choose, site, recompute=False), partial(step.groups, site)
        with TopKInterception(site.num_experts, site.top_k, site.rank, choose, groups):
            return live()

    def end(self, captured: Tensor) -> None:
        """End a step.

        Args:
            captured: what vLLM recorded of it, ``[N or more, L, K]``.

        Raises:
            ReplayError: a router did not follow.
        """
        step, self._step = self._step, None
        if step is None or step.routes is None or step.known is None:
            return
        for layer, site in self._sites.items():
            rows = step.known[:, layer]
            followed = step.routes[rows, layer, : site.top_k].to(captured.device)
            recorded = captured[: len(rows)][rows.to(captured.device), layer, : site.top_k]
            if not torch.equal(recorded.to(followed.dtype), followed):
                wrong = int((recorded != followed).any(-1).sum())
                raise ReplayError(f"layer {layer} did not follow {wrong} of {len(followed)} recorded rows")


def prove(
    layer: int, router: Any, hidden_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> RouterSite:
    """Have a router follow its own choice, which must change no bit, and then another; return its description.

    Args:
        layer: its decoder layer.
        router: vLLM's, which still chooses by itself.
        hidden_size: of the hidden states that it may read besides its logits.
        dtype: of its logits.
        device: where it computes.

    Raises:
        ValueError: it does not follow; the message names its class.
    """
    name = type(router).__name__
    site = RouterSite(layer=0, name=name, num_experts=router.global_num_experts, top_k=router.top_k, rank=2)
    random = torch.Generator().manual_seed(layer)
    logits = torch.randn(PROOF_ROWS, site.num_experts, generator=random).to(dtype)
    hidden = torch.zeros(PROOF_ROWS, hidden_size, dtype=dtype)
    logits, hidden = logits.to(device), hidden.to(device)
    other = torch.stack([torch.randperm(site.num_experts, generator=random) for _ in range(PROOF_ROWS)])

    def live() -> tuple[Tensor, Tensor]:
        weights, ids = router._compute_routing(hidden, logits.clone(), torch.int32)
        return weights, ids

    def following(ids: Tensor) -> tuple[Tensor, Tensor]:
        routing = ForcedRouting({0: site}, 1, site.top_k)
        routing.take({"proof": ids[:, None].to("cpu", torch.int16).numpy()}, {}, ())
        routing.begin([("proof", 0, PROOF_ROWS)])
        return routing.route(0, live)

    try:
        weights, ids = live()
        same_weights, same = following(ids)
        other_weights, others = following(other[:, : site.top_k])
        turned_weights, _ = following(other[:, : site.top_k].flip(1))
    except Exception as error:  # whatever a router's own code does with experts that it did not choose
        raise ValueError(f"layer {layer}: {site.name} cannot follow: {type(error).__name__}: {error}") from error
    if not torch.equal(same, ids) or not torch.equal(same_weights, weights):
        raise ValueError(f"layer {layer}: {site.name} does not give its own choice back")
    if not torch.equal(others.to("cpu", torch.int64), other[:, : site.top_k]):
        raise ValueError(f"layer {layer}: {site.name} does not follow other experts than its own")
    belongs = torch.allclose(turned_weights.flip(1), other_weights, rtol=1e-2)  # in any dtype and order of addition
    if not belongs or not bool((other_weights.isfinite() & (other_weights != 0)).all()):
        raise ValueError(f"layer {layer}: {site.name} does not weigh the experts that it follows")
    return replace(site, layer=layer)
