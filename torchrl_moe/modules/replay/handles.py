"""Handles on a model's modules while it has a ``RouterReplay``: they replace the forward of a few modules.

A handle is an object in the module's own ``__dict__``, not a closure: a deep copy or a pickle of the model holds
handles of its own modules, which do nothing until a ``RouterReplay`` is made for that model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchrl_moe._errors import ReplayError
from torchrl_moe.modules.replay.binding import Binding
from torchrl_moe.modules.replay.checkpointing import release_checkpoints
from torchrl_moe.modules.replay.discovery import RouterSite
from torchrl_moe.modules.replay.interception import TopK, TopKInterception
from torchrl_moe.modules.replay.state import ReplayState

__all__ = ["belong_to", "install", "owner", "uninstall"]


Jitter: TypeAlias = tuple[nn.Module, str, float]


class _Handle:
    """Stands in for ``module.forward``."""

    def __init__(self, module: nn.Module, state: ReplayState) -> None:
        self.module = module
        self.state = state
        self.shadowed = module.__dict__.get("forward")  # another library's replacement

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, looked up late: FSDP and parametrizations change its class."""
        if self.shadowed is not None:
            return self.shadowed(*args, **kwargs)
        # Not a bound method: Dynamo would look that up again.
        return type(self.module).forward(self.module, *args, **kwargs)


class _RouterHandle(_Handle):
    """On a router: runs its forward under the active binding."""

    def __init__(self, module: nn.Module, state: ReplayState, site: RouterSite) -> None:
        super().__init__(module, state)
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        binding, recompute = self.state.binding, self.state.recompute
        if binding is None:
            return self.forward(*args, **kwargs)
        if binding.measure:  # in a recompute too: selective checkpointing matches results by their order
            binding.compare(self.site, self._own_choice(*args, **kwargs))
        site = self.site

        def choose(scores: Tensor, own: Any) -> Tensor:
            return binding.choose(site, scores, own, recompute)

        def groups(scores: Tensor, own: Any, top_k: int) -> Tensor:
            return binding.groups(site, scores, own, top_k)

        opening = None if binding.routes is None else groups
        with TopKInterception(site.num_experts, site.top_k, site.rank, choose, opening):
            return self.forward(*args, **kwargs)

    def _own_choice(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the experts ``[N, K]`` that the router chooses in a separate run, with its own groups."""
        chosen: list[Tensor] = []

        def choose(scores: Tensor, own: Any) -> Tensor:
            result: TopK = own(None)
            chosen.append(result.indices.reshape(len(scores), -1))
            return chosen[-1]

        site = self.site
        with torch.no_grad(), TopKInterception(site.num_experts, site.top_k, site.rank, choose):
            self.forward(*args, **kwargs)
        return chosen[-1]


class _LayerHandle(_Handle):
    """On a decoder layer: it sees the batch's ``[B, T]``, routers see rows. Stores the routers' original jitter."""

    def __init__(self, module: nn.Module, state: ReplayState, jitter: list[Jitter]) -> None:
        super().__init__(module, state)
        self.jitter = jitter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        binding: Binding | None = self.state.binding
        if binding is not None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(hidden, Tensor) or hidden.ndim < 3:
                got = f"shape {list(hidden.shape)}" if isinstance(hidden, Tensor) else f"keywords {sorted(kwargs)}"
                raise ReplayError(
                    f"a decoder layer ({type(self.module).__name__}) must be called with hidden states [B, T, H], "
                    f"first or as hidden_states, got {got}: the batch that routes are laid out for cannot be seen"
                )
            binding.see_batch(tuple(hidden.shape[:2]))
        return self.forward(*args, **kwargs)


def _handles(model: nn.Module) -> Iterator[_Handle]:
    """Outermost first where a module has two."""
    for module in model.modules():
        handle = module.__dict__.get("forward")
        while isinstance(handle, _Handle):
            yield handle
            handle = handle.shadowed


def owner(model: nn.Module) -> object | None:
    """Return the ``RouterReplay`` that owns handles on this model; a deep copy's handles have no owner."""
    return next((handle.state.owner for handle in _handles(model) if handle.state.owner is not None), None)


def belong_to(model: nn.Module, state: ReplayState) -> bool:
    """Whether the handles on this model look their binding up in ``state``."""
    return any(handle.state is state for handle in _handles(model))


def install(model: nn.Module, sites: Sequence[RouterSite], state: ReplayState) -> None:
    """Put a handle on every router, and on the first decoder layer that has one; switch the routers' jitter off."""
    modules = dict(model.named_modules())
    for site in sites:
        router = modules[site.name]
        router.forward = _RouterHandle(router, state, site)
    layer = modules[sites[0].layer_name]
    layer.forward = _LayerHandle(layer, state, _silence_jitter(model))


def uninstall(model: nn.Module) -> None:
    """Remove every handle, and restore the routers' jitter."""
    for handle in list(_handles(model)):
        if isinstance(handle, _LayerHandle):
            for module, name, value in handle.jitter:
                setattr(module, name, value)
        if handle.shadowed is None:
            del handle.module.forward
        else:
            handle.module.forward = handle.shadowed
    release_checkpoints(model)


def _silence_jitter(model: nn.Module) -> list[Jitter]:
    """Set router jitter to 0, since it would change the scores of a replay; return the values to restore."""
    found = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if "jitter" in name and isinstance(value, float) and value > 0
    ]
    for module, name, _ in found:
        setattr(module, name, 0.0)
    return found
