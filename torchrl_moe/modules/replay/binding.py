"""The routes of one forward pass: bound per call, captured by checkpointed layers, never consumed.

Letters: B sequences, T tokens, N = B * T rows, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrl_moe._errors import ReplayError
from torchrl_moe.modules.replay.discovery import RouterSite
from torchrl_moe.modules.replay.interception import OwnChoice

__all__ = ["UNSET", "Binding", "LayerReport", "Recording", "live_rows"]

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
            routes[:, layer, : chosen.shape[1]] = chosen
        return routes.view(*self.shape, self._num_layers, self._top_k)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What one layer did in one forward.

    Rows replayed; rows on the live router; live rows of refused samples; replayed rows in which the live router agrees.
    """

    replayed: int
    live: int
    refused: int = 0
    agreeing: Tensor | None = None

    def to_dict(self) -> dict[str, Any]:
        """The entry of a layer in :meth:`RouterReplay.report`; waits for the device."""
        agreement = None
        if self.agreeing is not None and self.replayed:
            agreement = int(self.agreeing) / self.replayed
        return {"replayed": self.replayed, "live": self.live, "refused": self.refused, "agreement": agreement}


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Routes for one forward, or a place to record them.

    Args:
        layers: decoder layers with a router, as global indices.
        recording: filled with the experts that the routers use: their own choice, or in a replay the routes where
            known.
        routes: ``[N, L, K]`` of a signed integer type, in memory that nothing else writes to; ``None`` in a recording.
        shape: ``(B, T)`` of the routes' batch.
        known: ``[N, L]`` bool, rows that are replayed.
        replayed: number of replayed rows, by layer ``[L]``.
        complete: whether all rows are replayed, by layer. Such a layer needs no ``topk`` at all. (A compiled graph
            depends on this, and not on a count.)
        live: for each other layer the rows that are not replayed, int64 ``[M]``; ``topk`` runs only on these. Every
            rollout has some, because an engine knows no experts for a sequence's last token.
        refused: samples that run on the live router because their routes were bad.
        refused_rows: number of their rows.
        measure: also run each router on its own, and count the rows where it agrees as a set.
    """

    layers: tuple[int, ...]
    recording: Recording | None = None
    routes: Tensor | None = None
    shape: tuple[int, int] = (0, 0)
    known: Tensor | None = None
    replayed: tuple[int, ...] = ()
    complete: tuple[bool, ...] = ()
    live: Mapping[int, Tensor] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    refused_rows: int = 0
    measure: bool = False
    calls: dict[int, int] = field(default_factory=dict)
    agreeing: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, site: RouterSite, scores: Tensor, own: OwnChoice, recompute: bool) -> Tensor:
        """Return the experts ``[N, K]`` that a router uses for these rows.

        Args:
            site: the router.
            scores: ``[N, E]``, what it ranks.
            own: its own choice.
            recompute: whether this is a checkpointed layer's second run, which is not counted again.
        """
        layer = site.layer
        if self.recording is not None and recompute:  # kernels may break ties differently in the second run
            chosen = self.recording.by_layer[layer].long()
        elif self.routes is None:
            chosen = own(None).indices.reshape(len(scores), site.top_k)
        else:
            chosen = self._with_live(layer, self._experts(site, scores), own)
        if self.recording is not None and not recompute:
            self.recording.by_layer[layer] = chosen.to(torch.int16)
        if not recompute:
            self.calls[layer] = self.calls.get(layer, 0) + 1
        return chosen

    def groups(self, site: RouterSite, scores: Tensor, own: OwnChoice, top_k: int) -> Tensor:
        """Return the groups ``[N, *]`` that hold the experts to use, the router's own for live rows, some repeated.

        Args:
            site: the router.
            scores: ``[N, G]``, what it ranks the groups by.
            own: its own choice of groups.
            top_k: number of groups to return; may be more than the K experts need.
        """
        groups = self._experts(site, scores).clamp(min=0) // (site.num_experts // scores.shape[-1])
        return self._with_live(site.layer, _widened(groups, max(site.top_k, top_k)), own)

    def compare(self, site: RouterSite, own: Tensor) -> None:
        """Count the replayed rows in which the router's own choice ``[N, K]`` is the same set of experts."""
        experts = self._experts(site, own)
        same = (own.sort(-1).values == experts.sort(-1).values).all(-1)  # never in a live row, which holds -1
        self.agreeing[site.layer] = same.sum()

    def see_batch(self, shape: tuple[int, ...]) -> None:
        """Store ``(B, T)`` of the hidden states, or compare it with that of the routes.

        Raises:
            ReplayError: the routes belong to another batch, even if it has as many rows.
        """
        if self.recording is not None:
            self.recording.shape = shape
        if self.routes is not None and shape != self.shape:
            raise ReplayError(
                f"the forward pass has tokens {list(shape)}, the routes are for {list(self.shape)}: give routes laid "
                "out as the batch, [B, T, L, K], pads included. A forward pass that sees a part of each sequence "
                "(context or sequence parallelism) cannot be replayed"
            )

    def check_used(self) -> None:
        """Raise unless every router ran exactly once.

        Raises:
            ReplayError: no forward ran, or more than one, or it skipped some routers.
        """
        if not self.calls:
            raise ReplayError("the context closed and no forward pass of this model ran in it")
        wrong = [(layer, self.calls.get(layer, 0)) for layer in self.layers if self.calls.get(layer, 0) != 1]
        if wrong:
            detail = ", ".join(f"layer {layer} ran {count} times" for layer, count in wrong[:4])
            raise ReplayError(f"one forward pass per context: {detail}. Open a context for each micro-batch.")

    def report(self) -> dict[int, LayerReport]:
        """Return what each layer did; call :meth:`check_used` first."""
        if self.routes is None:
            assert self.recording is not None
            return {layer: LayerReport(0, len(self.recording.by_layer[layer])) for layer in self.layers}
        rows, refused = len(self.routes), self.refused_rows
        return {
            i: LayerReport(done, rows - done, refused, self.agreeing.get(i))
            for i, done in enumerate(self.replayed)
            if i in self.layers
        }

    def _with_live(self, layer: int, given: Tensor, own: OwnChoice) -> Tensor:
        """Put the router's own choice into the rows of ``given`` ``[N, *]`` that are not replayed."""
        if self.complete[layer]:
            return given
        if torch.compiler.is_compiling():  # where the number of rows would become part of the graph
            assert self.known is not None
            ours = own(None).indices
            return torch.where(
                self.known[:, layer, None].to(given.device), given, _widened(ours.flatten(0, -2), given.shape[1])
            )
        rows = self.live[layer].to(given.device)
        return given.index_copy(0, rows, _widened(own(rows).indices, given.shape[1]))

    def _experts(self, site: RouterSite, like: Tensor) -> Tensor:
        assert self.routes is not None
        if len(like) != len(self.routes):
            raise ReplayError(
                f"layer {site.layer}: its router has {len(like)} rows, the routes have {len(self.routes)}: this router "
                "does not see every token of the batch"
            )
        return self.routes[:, site.layer, : site.top_k].to(like.device, torch.long)


def live_rows(known: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Return by layer the rows, int64 ``[M]``, that are not in ``known`` ``[N, L]``."""
    live = ~known[:, list(layers)].T
    places = live.nonzero()[:, 1].split(live.sum(1).tolist())
    return dict(zip(layers, places, strict=True))


def _widened(choice: Tensor, width: int) -> Tensor:
    """Return ``[N, width]``: the columns of ``choice``, repeated from the first if there are too few."""
    if choice.shape[1] == width:
        return choice
    return choice[:, torch.arange(width, device=choice.device) % choice.shape[1]]
