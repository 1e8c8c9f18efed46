"""Finding the routers of a model by running it once: a router is the module whose own code ranks the experts.

No table of families: the modules of a small forward pass are watched, and every ``topk`` is credited to the innermost
module that runs. New architectures and remote code are found the same way, or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_moe._errors import UnsupportedRouterError
from torchrl_moe.modules.replay.interception import TopKObserver

__all__ = ["RouterSite", "discover", "dry_inputs", "number_of_layers"]

LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NESTED = ("text_config", "ffn_config", "llm_config")
DRY_TOKENS = 7  # no number of experts, so that scores over tokens are not taken for scores over experts
# Routers whose choice is more than a set of experts, or cannot be seen: the reason is the message.
REFUSED = {
    "PhimoeTopKRouter": "sparsemixer: two ordered slots, whose weights depend on the order, which engines do not keep",
    "LongcatFlashTopkRouter": "zero-computation experts: engines report them as expert 0",
}


@dataclass(frozen=True, slots=True)
class RouterSite:
    """One router: its decoder layer, its module's name, E, K, and how many dimensions the scores it ranks have."""

    layer: int
    name: str
    num_experts: int
    top_k: int
    rank: int

    @property
    def layer_name(self) -> str:
        """The name of the decoder layer's module."""
        match = LAYER.search(f"{self.name}.")
        assert match is not None
        return self.name[: match.end(1)]


def _expert_counts(config: Any) -> set[int]:
    """Return every number of experts that a config names."""
    found: set[int] = set()
    for part in [config, *(getattr(config, name, None) for name in NESTED)]:
        for name in EXPERT_COUNTS:
            value = getattr(part, name, None)
            values = value if isinstance(value, list | tuple) else [value]
            found |= {count for count in values if isinstance(count, int) and count > 1}
    return found


def number_of_layers(model: nn.Module) -> int:
    """Return L, the number of decoder layers, dense ones included."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    return int(text.num_hidden_layers)  # type: ignore[union-attr]


def dry_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Return the inputs of a small forward pass, on the model's device."""
    device = next(model.parameters()).device
    ids = torch.arange(DRY_TOKENS, device=device)[None] + 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def _running(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the names of the modules that run, innermost last."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(lambda *_: _pop(stack), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pop(stack: list[str]) -> None:
    stack.pop()


def discover(model: nn.Module) -> list[RouterSite]:
    """Return the routers of a model, by layer; runs one small forward pass without gradients.

    Raises:
        UnsupportedRouterError: the model has no router, or one whose choice cannot be replayed exactly.
    """
    counts = _expert_counts(getattr(model, "config", None))
    if not counts:
        raise UnsupportedRouterError(
            f"{type(model).__name__} has no experts by its config ({', '.join(EXPERT_COUNTS)}): it is a dense model"
        )
    _refuse_by_name(model)
    stack: list[str] = []
    calls: list[tuple[str, int, int, int]] = []

    def tell(x: Tensor, k: int) -> None:
        if stack and x.shape[-1] in counts and x.numel() // x.shape[-1] == DRY_TOKENS:
            calls.append((stack[-1], x.shape[-1], k, x.ndim))

    with torch.no_grad(), _running(model, stack), TopKObserver(tell):
        model(**dry_inputs(model))
    sites: dict[int, RouterSite] = {}
    for name, num_experts, top_k, rank in calls:
        match = LAYER.search(f"{name}.")
        if match is None:
            continue
        layer = int(match[1])
        if layer in sites and sites[layer].name != name:
            raise UnsupportedRouterError(
                f"layer {layer} has two modules that rank {num_experts} experts: {sites[layer].name} and {name}"
            )
        sites[layer] = RouterSite(layer, name, num_experts, top_k, rank)  # the last one: groups are ranked before
    _check_all_found(model, sites)
    return [sites[layer] for layer in sorted(sites)]


def _refuse_by_name(model: nn.Module) -> None:
    for name, module in model.named_modules():
        reason = REFUSED.get(type(module).__name__)
        if reason is not None:
            raise UnsupportedRouterError(f"{name} ({type(module).__name__}) cannot be replayed: {reason}")


def _check_all_found(model: nn.Module, sites: dict[int, RouterSite]) -> None:
    """Refuse a model in which a layer has experts, but no router was seen."""
    for name, module in model.named_modules():
        match = LAYER.search(name)
        if match is None or name.rpartition(".")[2] != "experts" or int(match[1]) in sites:
            continue
        raise UnsupportedRouterError(
            f"{name} ({type(module).__name__}) has experts, but nothing in layer {match[1]} ranks them with topk: "
            "its router cannot be replayed"
        )
    if not sites:
        raise UnsupportedRouterError(f"{type(model).__name__}: no module ranks experts with topk in a forward pass")
