"""Freezing routers: training continues with fixed router weights."""

from __future__ import annotations

from torch import nn

from torchrl_moe.modules.replay.discovery import discover

__all__ = ["freeze_routers"]


def freeze_routers(model: nn.Module) -> list[str]:
    """Set ``requires_grad=False`` on the parameters of every router; return their names.

    A frozen router still chooses other experts when its hidden states change. Call this before the optimizer is made;
    ``parameter.requires_grad_(True)`` undoes it. Runs a small forward pass to find the routers. Where a family ranks
    experts in the block that holds them, experts and shared experts stay trainable.

    Args:
        model: a transformers MoE for causal language modelling, with a ``RouterReplay`` or without.

    Raises:
        UnsupportedRouterError: no router was found.

    >>> from torchrl_moe.testing import make_tiny_moe
    >>> freeze_routers(make_tiny_moe("mixtral", num_hidden_layers=2))
    ['model.layers.0.mlp.gate.weight', 'model.layers.1.mlp.gate.weight']
    """
    modules = dict(model.named_modules())
    frozen = []
    for site in discover(model):
        for name, parameter in modules[site.name].named_parameters():
            if "expert" not in name:
                parameter.requires_grad_(False)
                frozen.append(f"{site.name}.{name}")
    return frozen
