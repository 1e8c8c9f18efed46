"""Routers in float32 in a model that computes in a narrower dtype: weights, logits and scores.

Autocast rounds a router's weights at each forward pass, even where a family's own code asks for float32, and
``MixedPrecisionPolicy`` rounds them as FSDP2 gathers them. What is trained in float32 then routes in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.replay.discovery import RouterSite, discover, dry_inputs
from torchrl_moe.modules.replay.router_replay import innermost_handle


class _InFloat32:
    """Stands in for the ``forward`` of a module: an object in its ``__dict__``, so that a deep copy has its own."""

    def __init__(self, module: nn.Module, shadowed: Callable[..., object] | None) -> None:
        self.module, self.shadowed = module, shadowed

    def __call__(self, *args: object, **kwargs: object) -> object:
        device = next(self.module.parameters()).device.type
        with torch.autocast(device, enabled=False):
            wide = [_widened(value) for value in args]
            named = {name: _widened(value) for name, value in kwargs.items()}
            if self.shadowed is not None:
                return self.shadowed(*wide, **named)
            return type(self.module).forward(self.module, *wide, **named)  # FSDP changes the class: looked up late


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def float32_routers(model: nn.Module) -> list[str]:
    """Have every router of a model compute in float32, whatever autocast or the model's own dtype; return names.

    The names are those of the routers' weights, which become float32 where they are narrower: digits that were rounded
    away before do not come back. Call this before the optimizer is made. FSDP2 rounds what it gathers in ``bfloat16``:
    shard with a policy that casts nothing, and use autocast, or give each router a unit of its own,
    ``MixedPrecisionPolicy(param_dtype=torch.float32)``. It runs a small forward pass to find the routers. A second call
    changes nothing. An engine has the same with ``router_dtype="float32"``.

    Args:
        model: a transformers MoE for causal language modelling, with a ``RouterReplay`` or without.

    Raises:
        UnsupportedRouterError: no router was found; its weight cannot be told from others, or is sharded in a narrower
            dtype; or the family's code does not take routers that are wider than the rest.

    >>> from torchrl_moe.testing import make_tiny_moe
    >>> model = make_tiny_moe("mixtral", num_hidden_layers=2, dtype=torch.bfloat16)
    >>> float32_routers(model)
    ['model.layers.0.mlp.gate.weight', 'model.layers.1.mlp.gate.weight']
    >>> model.model.layers[0].mlp.gate.weight.dtype
    torch.float32
    """
    modules = dict(model.named_modules())
    found = [(site, *_owner(modules[site.name], site)) for site in discover(model)]
    own = [tensor for _, _, module in found for tensor in (*module._parameters.values(), *module._buffers.values())]
    floats = [(tensor, tensor.dtype) for tensor in own if tensor is not None and tensor.is_floating_point()]
    with ExitStack() as undo:
        for tensor, dtype in floats:
            undo.callback(_cast, tensor, dtype)
            _cast(tensor, torch.float32)
        for _, _, module in found:
            undo.callback(_install(module))
        try:
            with torch.no_grad():
                model(**dry_inputs(model))
        except RuntimeError as error:  # torch's, of two dtypes that do not go together
            raise UnsupportedRouterError(
                f"{type(model).__name__} cannot have routers in float32 beside narrower weights: its code takes both "
                f"in one dtype ({str(error).splitlines()[0]}). Hold all weights in float32, and run it under "
                "torch.autocast."
            ) from error
        undo.pop_all()  # it runs: nothing is undone
    return [f"{site.name}.{name}weight" for site, name, _ in found]


def _cast(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor.data = tensor.data.to(dtype)


def _owner(router: nn.Module, site: RouterSite) -> tuple[str, nn.Module]:
    """Return the module that makes a router's logits, and its name in the router with a dot, or ``""``."""
    makers: dict[str, nn.Module] = {}
    for name, module in router.named_modules():
        weight = module._parameters.get("weight")
        if "expert" not in name and weight is not None and weight.ndim == 2 and len(weight) == site.num_experts:
            makers[f"{name}." if name else ""] = module
    if len(makers) != 1:
        seen = ", ".join(makers) or "none"
        raise UnsupportedRouterError(
            f"{site.name} ({type(router).__name__}) cannot compute in float32: one weight of shape "
            f"[{site.num_experts}, hidden size] is expected in it, and these modules have one: {seen}"
        )
    ((name, module),) = makers.items()
    weight = module._parameters["weight"]
    assert weight is not None
    if hasattr(weight, "full_tensor") and weight.dtype != torch.float32:
        raise UnsupportedRouterError(
            f"{site.name}.{name}weight is sharded in {weight.dtype}: call float32_routers before fully_shard"
        )
    return name, module


def _install(module: nn.Module) -> Callable[[], None]:
    """Put the stand-in below the handle of a ``RouterReplay``, if there is one, which intercepts what runs inside.

    Return what takes it away again.
    """
    handle = innermost_handle(module)
    place, name = (module.__dict__, "forward") if handle is None else (vars(handle), "shadowed")
    below = place.get(name)
    if isinstance(below, _InFloat32):
        return lambda: None
    place[name] = _InFloat32(module, below)
    return lambda: place.update({name: below}) if below is not None or handle is not None else place.pop(name)
