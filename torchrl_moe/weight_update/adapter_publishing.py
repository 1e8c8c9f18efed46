"""Writing versions of an adapter to the weight store; the base weights are not sent."""

from __future__ import annotations

import torch
from torch import nn

from torchrl_moe.weight_update.metadata import trained_model
from torchrl_moe.weight_update.options import StoreOptions
from torchrl_moe.weight_update.publishing import Publisher
from torchrl_moe.weight_update.source.layout import Kinds, Source, Weights
from torchrl_moe.weight_update.source.lora import adapter_files, check_adapter, check_shapes
from torchrl_moe.weight_update.store import VersionsWriter, adapter_tensors

__all__ = ["AdapterPublisher"]


class AdapterPublisher(Publisher):
    """Writes versions of a peft model's adapter; arguments as for :class:`Publisher`."""

    def register(self, model: nn.Module) -> None:
        """Set the model whose adapter is sent by default; its base may be quantised.

        Raises:
            ValueError: it has no adapter that vLLM would apply as peft does.
            ManifestMismatch: the adapter is not for the engine's weights.
        """
        module = trained_model(model)
        _check(module, self.expected)
        self._module = module

    def check(self, expected: Kinds) -> None:
        """Check that the registered model's adapter, if there is one, fits an engine's weights; raises as above."""
        if self._module is not None:
            _check(self._module, expected)

    def expect(self, expected: Kinds, engine_dtype: torch.dtype | None) -> None:
        """Store the engine's tensors."""
        self.expected, self.engine_dtype = expected, engine_dtype

    def _source(self, weights: Weights | None) -> Source:
        model = self._module if weights is None else self._given(weights)
        if model is None:
            raise RuntimeError("publish: no model; call register_model(model) first, or pass one")
        _check(model, self.expected)  # what is active may have changed
        tensors = adapter_tensors(adapter_files(model))
        return Source(
            {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, lambda: iter(tensors.items())
        )

    def _kinds(self, source: Source) -> Kinds:
        return source.kinds

    def _new_writer(self, store: StoreOptions) -> VersionsWriter:
        return VersionsWriter(store.folder, store.keep_versions)

    def _given(self, weights: Weights) -> nn.Module:
        if not isinstance(weights, nn.Module):
            raise ValueError(f"lora='adapter' sends the adapter of a peft model, got {type(weights).__name__}")
        return trained_model(weights)


def _check(model: nn.Module, expected: Kinds | None) -> None:
    check_adapter(model)
    if expected is not None:
        check_shapes(model, expected)
