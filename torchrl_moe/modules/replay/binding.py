"""What one forward pass is to do with its routes. Bound per call, captured by checkpointed layers, never consumed.

Letters: B sequences, T tokens, N = B * T rows, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrl_moe import _checks
from torchrl_moe._errors import ReplayError, RouteShapeError, RouteValueError
from torchrl_moe.modules.replay.discovery import RouterSite
from torchrl_moe.modules.replay.interception import TopK

__all__ = ["UNSET", "Binding", "LayerReport", "Recording", "ReplayState", "bind_routes"]

UNSET = -1


class Recording:
    """Fills up while the model runs inside :meth:`RouterReplay.record`."""

    def __init__(self, num_layers: int, top_k: int) -> None:
        self._num_layers = num_layers
        self._top_k = top_k
        self.by_layer: dict[int, Tensor] = {}
        self.shape: tuple[int, ...] = ()

    @property
    def routed_experts(self) -> Tensor:
        """int16 ``[B, T, L, K]`` on the model's device; -1 where a layer has no router, or a smaller K.

        Raises:
            ReplayError: no forward pass has run.
        """
        if not self.by_layer or not self.shape:
            raise ReplayError("nothing was recorded: run the model inside `with replay.record() as rec`")
        first = next(iter(self.by_layer.values()))
        routes = torch.full((len(first), self._num_layers, self._top_k), UNSET, dtype=torch.int16, device=first.device)
        for layer, chosen in self.by_layer.items():
            routes[:, layer, : chosen.shape[1]] = chosen.to(torch.int16)
        return routes.view(*self.shape, self._num_layers, self._top_k)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What one layer did in one forward: rows replayed, rows on the live router, rows of the former where it agreed."""

    replayed: int
    live: int
    agreeing: Tensor | None = None

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`RouterReplay.report` says of a layer; waits for the device."""
        agreement = None
        if self.agreeing is not None and self.replayed:
            agreement = int(self.agreeing) / self.replayed
        return {"replayed": self.replayed, "live": self.live, "agreement": agreement}


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Routes for one forward, or a place to record them.

    Args:
        layers: decoder layers with a router, as global indices.
        recording: filled with what the routers choose; ``None`` in a replay.
        routes: ``[N, L, K]`` of a signed integer type, nobody else's memory; ``None`` in a recording.
        known: ``[N, L]`` bool, rows that are replayed.
        replayed: how many those are, by layer ``[L]``. A layer where they are all needs no ``topk`` at all.
        measure: also run each router on its own, and count the rows where it agrees as a set.
    """

    layers: tuple[int, ...]
    recording: Recording | None = None
    routes: Tensor | None = None
    known: Tensor | None = None
    replayed: tuple[int, ...] = ()
    measure: bool = False
    calls: dict[int, int] = field(default_factory=dict)
    agreeing: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, site: RouterSite, scores: Tensor, own: Callable[[], TopK], recompute: bool) -> Tensor:
        """Return the experts ``[N, K]`` that a router uses for these rows.

        Args:
            site: the router.
            scores: ``[N, E]``, what it ranks.
            own: its own choice.
            recompute: whether this is a checkpointed layer's second run, which is not counted again.
        """
        layer = site.layer
        if self.routes is None:
            chosen = own().indices.reshape(len(scores), site.top_k)
        else:
            chosen = self._experts(site, scores)
            if not self._complete(layer):
                ours = own().indices.reshape(chosen.shape)
                chosen = torch.where(self._known(layer, scores), chosen, ours)
        if not recompute:
            self.calls[layer] = self.calls.get(layer, 0) + 1
            if self.recording is not None:
                self.recording.by_layer[layer] = chosen
        return chosen

    def groups(self, site: RouterSite, scores: Tensor, own: Callable[[], TopK]) -> Tensor:
        """Return the groups ``[N, K]`` that hold the experts to use; the router's own, repeated, for live rows.

        Args:
            site: the router.
            scores: ``[N, G]``, what it ranks the groups by.
            own: its own choice of groups.
        """
        groups = self._experts(site, scores).clamp(min=0) // (site.num_experts // scores.shape[-1])
        if self._complete(site.layer):
            return groups
        ours = own().indices
        repeated = ours[:, torch.arange(site.top_k, device=ours.device) % ours.shape[1]]
        return torch.where(self._known(site.layer, scores), groups, repeated)

    def compare(self, site: RouterSite, own: Tensor) -> None:
        """Count the replayed rows in which the router's own choice ``[N, K]`` is the same set of experts."""
        experts = self._experts(site, own)
        same = (own.sort(-1).values == experts.sort(-1).values).all(-1)  # never in a live row, which holds -1
        self.agreeing[site.layer] = same.sum()

    def check_used(self) -> None:
        """Raise unless every router ran exactly once.

        Raises:
            ReplayError: no forward ran, or more than one, or it went past some routers.
        """
        if not self.calls:
            raise ReplayError("the context closed and no forward pass of this model ran in it")
        wrong = [(layer, self.calls.get(layer, 0)) for layer in self.layers if self.calls.get(layer, 0) != 1]
        if wrong:
            detail = ", ".join(f"layer {layer} ran {count} times" for layer, count in wrong[:4])
            raise ReplayError(f"one forward pass per context: {detail}. Open a context for each micro-batch.")

    def report(self) -> dict[int, LayerReport]:
        """Return what each layer did; to be asked after :meth:`check_used`."""
        if self.recording is not None:
            return {layer: LayerReport(0, len(self.recording.by_layer[layer])) for layer in self.layers}
        assert self.routes is not None
        rows, replayed = len(self.routes), self.replayed
        return {i: LayerReport(replayed[i], rows - replayed[i], self.agreeing.get(i)) for i in self.layers}

    def _complete(self, layer: int) -> bool:
        assert self.routes is not None
        return self.replayed[layer] == len(self.routes)

    def _known(self, layer: int, like: Tensor) -> Tensor:
        assert self.known is not None
        return self.known[:, layer, None].to(like.device)

    def _experts(self, site: RouterSite, like: Tensor) -> Tensor:
        assert self.routes is not None
        if len(like) != len(self.routes):
            raise ReplayError(
                f"layer {site.layer}: the forward pass has {len(like)} rows, the routes have {len(self.routes)}: give "
                "routes laid out as the batch, [B, T, L, K], pads included"
            )
        return self.routes[:, site.layer, : site.top_k].to(like.device, torch.long)


def bind_routes(
    routes: Any, sites: Sequence[RouterSite], num_layers: int, attention_mask: Tensor | None, measure: bool
) -> Binding:
    """Check routes ``[B, T, L, K]`` and bind them to one forward pass; see :meth:`RouterReplay.replay`."""
    routes = torch.as_tensor(getattr(routes, "full", routes))
    top_k = max(site.top_k for site in sites)
    hint = "Routes are laid out as the batch; L counts all decoder layers, dense ones too."
    _checks.check_shape("routes", routes.shape, ("B", "T", num_layers, top_k), error=RouteShapeError, hint=hint)
    hint = "For what an engine returned, RoutedExperts.from_vllm."
    _checks.check_integer("routes", routes, signed=True, error=RouteValueError, hint=hint)
    num_tokens = routes.shape[1]
    flat = routes.detach().flatten(0, 1).clone()
    if attention_mask is not None:
        hint = "It is that of the batch, [B, T]."
        shape = tuple(routes.shape[:2])
        _checks.check_shape("attention_mask", attention_mask.shape, shape, error=RouteShapeError, hint=hint)
        flat[~attention_mask.bool().flatten().to(flat.device)] = UNSET
    _check_values(flat, sites, lambda row: f"sample {row // num_tokens}, token {row % num_tokens}")
    known = flat[..., 0] != UNSET
    return Binding(
        layers=tuple(site.layer for site in sites),
        routes=flat,
        known=known,
        replayed=tuple(known.sum(0).tolist()),
        measure=measure,
    )


def _check_values(flat: Tensor, sites: Sequence[RouterSite], where: Callable[[int], str]) -> None:
    """Check ``[N, L, K]``; layers of another E or K are checked apart, and a smaller K leaves trailing -1."""
    kinds = {(site.num_experts, site.top_k) for site in sites}
    for num_experts, top_k in sorted(kinds):
        layers = [site.layer for site in sites if (site.num_experts, site.top_k) == (num_experts, top_k)]
        part = flat[..., :top_k]
        if len(kinds) > 1:
            others = [site.layer for site in sites if site.layer not in layers]
            part = part.index_fill(1, torch.tensor(others, device=flat.device), UNSET)
        _checks.check_routes(part, layers, num_experts, where=where)
        if bool((flat[:, layers, top_k:] != UNSET).any()):
            raise RouteValueError(
                f"routes: layers {layers} choose {top_k} experts, so columns {top_k} and up must be -1 in them"
            )


class ReplayState:
    """What the handles of one model look up while they run: the active binding, and whose it is.

    Plain attributes rather than a context variable, so that a compiled graph can read them. A copy, or what comes out
    of a pickle, starts without a binding and without an owner: the original's contexts do not reach a copied model.
    """

    def __init__(self, owned: bool = False) -> None:
        self.owned = owned
        self.active: Binding | None = None
        self.recompute = False
        self._thread: int | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayState, ()

    @property
    def binding(self) -> Binding | None:
        """The active binding.

        Raises:
            ReplayError: it is another thread's.
        """
        ours = torch.compiler.is_compiling() or self.recompute or self._thread == threading.get_ident()
        if self.active is not None and not ours:
            raise ReplayError("another thread has a context of this model open: one thread at a time")
        return self.active

    @contextmanager
    def opened(self, binding: Binding) -> Iterator[None]:
        """Make ``binding`` the active one.

        Raises:
            ReplayError: there is one already, or this model's handles were removed.
        """
        thread = threading.get_ident()
        with self._lock:
            if not self.owned:
                raise ReplayError("this RouterReplay was removed from its model: make a new one")
            if self._thread not in (None, thread):
                raise ReplayError("another thread has a context of this model open: one thread at a time")
            if self.active is not None:
                raise ReplayError("a context of this model is open already: close it first, they do not nest")
            self._thread = thread
        try:
            with self.holding(binding, recompute=False):
                yield
        finally:
            self._thread = None

    @contextmanager
    def holding(self, binding: Binding | None, recompute: bool) -> Iterator[None]:
        """Run with ``binding``, and put back what was there."""
        before = self.active, self.recompute
        self.active, self.recompute = binding, recompute
        try:
            yield
        finally:
            self.active, self.recompute = before
