"""A toy MoE that is not of transformers, and routers for it that are wrong on purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_moe.modules.replay.binding import UNSET, Binding
from torchrl_moe.modules.replay.discovery import RouterSite
from torchrl_moe.modules.replay.router_replay import bind_routes


class ToyRouter(nn.Module):
    """Softmax, top-k. ``forward`` is what the subclasses below do wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))

    def scores(self, hidden: Tensor) -> Tensor:
        return (hidden.flatten(0, -2) @ self.weight.T).softmax(-1)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.scores(hidden).topk(2)
        return weights, experts


class NoisyRouter(ToyRouter):
    def scores(self, hidden: Tensor) -> Tensor:
        return (super().scores(hidden) + torch.rand(8)).softmax(-1)


class SortingRouter(ToyRouter):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.scores(hidden).sort(-1, descending=True)
        return weights[:, :2], experts[:, :2]


class TwiceRouter(ToyRouter):
    """Takes the ids of one ``topk`` and the weights of another, of other scores."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(hidden)
        return scores.sqrt().topk(2).values, scores.topk(2).indices


class DeafRouter(SortingRouter):
    """Calls ``topk`` as it should, and chooses in another way."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self.scores(hidden).topk(2)
        return super().forward(hidden)


class RegroupingRouter(ToyRouter):
    """Ranks its K choices again, which are as wide as a number of groups could be."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = super().forward(hidden)
        order = weights.topk(2).indices
        return weights.gather(-1, order), experts.gather(-1, order)


class RenumberingRouter(ToyRouter):
    """Its experts go by other numbers than its scores."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = super().forward(hidden)
        return weights, (experts + 1) % 8


class GroupedRouter(ToyRouter):
    """Zeroes the experts outside two of four groups, by group scores ``[B, T, G]``."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = (hidden @ self.weight.T).softmax(-1)
        groups = scores.unflatten(-1, (4, 2)).amax(-1)
        allowed = torch.zeros_like(groups).scatter(-1, groups.topk(2).indices, 1).repeat_interleave(2, -1)
        weights, experts = (scores * allowed).topk(2)
        return weights.flatten(0, 1), experts.flatten(0, 1)


class MaskingRouter(ToyRouter):
    """Masks groups by sorting, and takes a softmax of what is left: 0 for a masked expert, nan for two."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(hidden)
        groups = scores.unflatten(-1, (4, 2)).amax(-1)
        least = groups.sort(-1, descending=True).values[:, 1:2]
        weights, experts = scores.masked_fill((groups < least).repeat_interleave(2, -1), -torch.inf).topk(2)
        return weights.softmax(-1), experts


class ThresholdRouter(ToyRouter):
    """Takes the least chosen score for a threshold under which a weight is 0."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(hidden)
        chosen, experts = scores.topk(2)
        return scores.masked_fill(scores < chosen[:, -1:], 0).gather(1, experts), experts


class StubbornRouter(ToyRouter):
    """Drops a chosen expert that is not among its own four best."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(hidden)
        order = scores.argsort(-1, descending=True)
        weights, experts = scores.topk(2)
        fit = (experts[..., None] == order[:, None, :4]).any(-1)
        return weights, torch.where(fit, experts, order[:, :2])


class PhimoeTopKRouter(ToyRouter):
    """Only the name is real."""


class ToyExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, 16, generator=torch.Generator().manual_seed(2)) / 4)

    def forward(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return torch.einsum("nk,nkij,nj->ni", weights, self.weight[experts], hidden)


class ToyLayer(nn.Module):
    def __init__(self, routers: list[nn.Module]) -> None:
        super().__init__()
        self.gates = nn.ModuleList(routers)
        self.experts = ToyExperts()

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        return hidden + sum(self.experts(rows, *gate(hidden)) for gate in self.gates).view(hidden.shape)


class ToyMoE(nn.Module):
    """Not of transformers: two layers of 8 experts, 2 per token, with the routers it is given."""

    def __init__(self, router: type[nn.Module] = ToyRouter, per_layer: int = 1, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**(config or {"num_experts": 8}), num_hidden_layers=2)
        self.embed = nn.Embedding.from_pretrained(torch.randn(32, 16, generator=torch.Generator().manual_seed(0)))
        self.layers = nn.ModuleList(ToyLayer([router() for _ in range(per_layer)]) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return (hidden,)


U = UNSET
SITES = [RouterSite(layer, f"layers.{layer}.gate", 8, 2, 2) for layer in (1, 2)]
ROUTES = torch.tensor([[U, U], [5, 3], [0, 1]]).repeat(2, 3, 1, 1)
"""[B=2, T=3, L=3, K=2], layer 0 dense."""
SCORES = torch.rand(6, 8, generator=torch.Generator().manual_seed(0))


def bound(
    routes: object = ROUTES, mask: Tensor | None = None, sites: list[RouterSite] = SITES, **options: Any
) -> Binding:
    return bind_routes(routes, sites, 3, attention_mask=mask, **options)


def own(rows: Tensor | None = None) -> torch.return_types.topk:
    return (SCORES if rows is None else SCORES[rows]).topk(2)


def changed(place: tuple[int, ...], value: object) -> Tensor:
    routes = ROUTES.clone()
    routes[place] = torch.tensor(value)
    return routes
