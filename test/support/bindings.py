"""Bindings by hand: routes and scores for two routers without a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_moe.modules.replay.binding import UNSET, Binding
from torchrl_moe.modules.replay.discovery import RouterSite
from torchrl_moe.modules.replay.router_replay import bind_routes

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
