"""Routes of tiny MoEs: drawn at random, recorded, and as they reach the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.replay.discovery import LAYER
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing import make_tiny_moe

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")
SHAPE = (2, 6)
U = -1


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape or SHAPE, generator=torch.Generator().manual_seed(seed))


def random_routes(replay: RouterReplay, *shape: int, seed: int = 0) -> Tensor:
    """Distinct experts in every row ``[B, T, L, K]``, -1 on dense layers."""
    generator = torch.Generator().manual_seed(seed)
    shape = shape or SHAPE
    routes = torch.full((*shape, replay.num_layers, replay.top_k), U)
    for site in replay.sites:
        noise = torch.rand(*shape, site.num_experts, generator=generator)
        routes[:, :, site.layer, : site.top_k] = noise.argsort(-1)[..., : site.top_k]
    return routes


def rows_at_random(layout: RoutingLayout, count: int, seed: int = 0) -> Any:
    """Rows ``[count, L, K]`` of an engine's layout that no router would choose."""
    rng = np.random.default_rng(seed)
    rows = np.full((count, layout.num_layers, layout.top_k), U, layout.numpy_dtype)
    for layer in layout.moe_layers:
        rows[:, layer] = rng.permuted(np.tile(np.arange(layout.num_experts), (count, 1)), axis=1)[:, : layout.top_k]
    return rows


def rows_of(*experts: int) -> Any:
    """Rows int8 ``[T, 4, 2]``: an expert and the next one on all layers but the first, or -1 for no route."""
    rows = np.full((len(experts), 4, 2), U, np.int8)
    for row, expert in zip(rows, experts, strict=True):
        if expert >= 0:
            row[1:] = expert, expert + 1
    return rows


def recorded(model: nn.Module, replay: RouterReplay, ids: Tensor | None = None) -> Tensor:
    """The model's own routes ``[B, T, L, K]``."""
    with replay.record() as recording, torch.no_grad():
        model(tokens() if ids is None else ids)
    return recording.routed_experts


def pair(family: str = "qwen3_moe", **config: Any) -> tuple[nn.Module, RouterReplay]:
    model = make_tiny_moe(family, **config)
    return model, RouterReplay(model)


@contextmanager
def experts_seen(model: nn.Module) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """By layer, the ids and the weights ``[N, K]`` that reach the experts, where they are told."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if len(args) > 1:
                seen[layer] = args[1].clone(), args[2].detach().clone()

        return hook

    hooks = []
    for name, module in model.named_modules():
        layer = LAYER.search(name)
        if layer is not None and name.endswith(".experts"):
            hooks.append(module.register_forward_pre_hook(keep(int(layer[1]))))
    yield seen
    for hook in hooks:
        hook.remove()
