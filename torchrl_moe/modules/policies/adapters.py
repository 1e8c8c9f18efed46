"""LoRA adapters of peft, seen from their base weights: merged sums computed one tensor at a time, nothing changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LoraLayers", "base_model", "has_adapters"]


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has added adapters to a model's weights."""
    return hasattr(model, "get_base_model") or bool(getattr(model, "_hf_peft_config_loaded", False))


def base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside peft's wrapper, or the model itself."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return base


class LoraLayers:
    """The layers of a base model that peft has replaced by ones with adapters.

    Args:
        base: the model with the layers in it.

    Raises:
        TypeError: adapters that are not LoRA, or not a plain sum ``W + scale * B A``.
    """

    def __init__(self, base: nn.Module) -> None:
        self._layers: dict[str, list[Any]] = {}  # state-dict key of the base weight -> layers that add to it
        self._saved: dict[str, str] = {}  # modules trained beside the adapters -> the active copy's name
        for name, module in base.named_modules():
            if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
                self._saved[name] = str(module.active_adapter)
            if not hasattr(module, "base_layer"):
                continue
            if not hasattr(module, "get_delta_weight") or not hasattr(module, "lora_A"):
                raise TypeError(
                    f"{name} has an adapter that is not LoRA ({type(module).__name__}): call model.merge_and_unload() "
                    "and send the merged model"
                )
            layer: Any = module
            if getattr(layer, "lora_variant", None) or any(getattr(layer, "lora_bias", {}).values()):
                raise TypeError(
                    f"{name} has an adapter that is not a plain sum of weights (DoRA, or a bias): call "
                    "model.merge_and_unload() and send the merged model"
                )
            parameter = getattr(layer, "parameter_name", "weight")
            self._layers.setdefault(f"{_without_layers(name)}.{parameter}", []).append(layer)

    def own_weights(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield a state dict's base weights under the names that they have without adapters."""
        for key, tensor in state.items():
            if ".lora_" in key or ".original_module." in key:
                continue
            for name, adapter in self._saved.items():
                key = key.replace(f"{name}.modules_to_save.{adapter}.", f"{name}.")
            if ".modules_to_save." not in key:
                yield _without_layers(key), tensor

    def __contains__(self, key: str) -> bool:
        return key in self._layers

    def in_use(self) -> Iterator[str]:
        """Yield the state-dict keys of weights that an active adapter adds to."""
        return (key for key in self._layers if any(self._active(key)))

    def _active(self, key: str) -> Iterator[tuple[Any, str]]:
        for layer in self._layers[key]:
            for adapter in layer.active_adapters:
                if adapter in layer.scaling and adapter not in layer.merged_adapters:
                    yield layer, adapter

    @torch.no_grad()
    def merged(self, key: str, weight: Tensor) -> Tensor:
        """Return a weight with its active adapters added, as ``merge_and_unload`` would; ``weight`` is not changed.

        The sum is rounded once. peft does the same, except for embeddings, whose adapter it rounds first.
        """
        total = weight
        for layer, adapter in self._active(key):
            delta = whole(layer.get_delta_weight(adapter)).to(total.device)
            total = (total + delta).to(weight.dtype)
        return total


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a sharded tensor gathered, for which all ranks must call; any other tensor is returned as it is.

    Args:
        tensor: it may be sharded.
        dtype: if a floating-point tensor is wider, each rank casts its part to this before sending it; ``None``: no
            cast.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if dtype is not None and tensor.is_floating_point() and dtype.itemsize < tensor.dtype.itemsize:
        tensor = tensor.to(dtype)
    gathered: Tensor = tensor.full_tensor()
    return gathered


def _without_layers(key: str) -> str:
    while ".base_layer" in key:
        key = key.replace(".base_layer", "")
    return key
