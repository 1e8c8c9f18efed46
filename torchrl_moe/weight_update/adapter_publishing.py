"""Writing versions of an adapter to the weight store; the weights beside it stay where they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import nn

from torchrl_moe.weight_update.metadata import trained_model
from torchrl_moe.weight_update.publishing import Published, Publisher
from torchrl_moe.weight_update.source.layout import Kinds, Weights
from torchrl_moe.weight_update.source.lora import adapter_files, check_adapter, check_shapes
from torchrl_moe.weight_update.source.ranks import is_first
from torchrl_moe.weight_update.store.adapters import AdapterWriter, adapter_versions

__all__ = ["AdapterPublisher"]


class AdapterPublisher(Publisher):
    """Writes versions of the adapter that a peft model has; arguments as of :class:`Publisher`."""

    _adapters: AdapterWriter | None = None

    def register(self, model: nn.Module) -> None:
        """Take the model whose adapter is sent where no other is given; its base may be quantised.

        Raises:
            ValueError: it has no adapter that vLLM would apply as peft does.
            ManifestMismatch: the adapter is not for the engine's weights.
        """
        module = trained_model(model)
        _check(module, self.expected)
        self._module = module

    def check(self, expected: Kinds) -> None:
        """Check that the registered model's adapter, if there is one, is for what an engine has; raises as above."""
        if self._module is not None:
            _check(self._module, expected)

    def expect(self, expected: Kinds, engine_dtype: torch.dtype | None) -> None:
        """Take note of what the engine has."""
        self.expected, self.engine_dtype = expected, engine_dtype

    def newest(self) -> int:
        """Return the newest version in the store, which may be of a trainer before this one; -1 if there is none."""
        return max(adapter_versions(self._store.folder), default=-1)

    def publish(self, weights: Weights | None, number: Callable[[], int]) -> Published:
        """Write a version. Of several ranks, rank 0 writes, unless another has an engine of its own.

        Args:
            weights: a peft model; ``None`` for the registered one.
            number: gives the version's.

        Raises:
            ValueError: ``weights`` is something else.
            RuntimeError: there is neither.
            WeightSyncError: it could not be written.
        """
        version = number()
        model = self._module if weights is None else self._given(weights)
        if model is None:
            raise RuntimeError("publish: no model; call register_model(model) first, or pass one")
        if not is_first() and self.expected is None:
            return Published(version=version, manifest=None)
        began = time.perf_counter()
        _check(model, self.expected)  # what is active may have changed
        if self._adapters is None:
            self._adapters = AdapterWriter(self._store.folder, self._store.keep_versions)
        manifest = self._adapters.publish(adapter_files(model), version)
        return Published(version=version, manifest=manifest, began=began, seconds=time.perf_counter() - began)

    def _given(self, weights: Weights) -> nn.Module:
        if not isinstance(weights, nn.Module):
            raise ValueError(f"lora='adapter' sends the adapter of a peft model, got {type(weights).__name__}")
        return trained_model(weights)

    def publish_behind(self, weights: Weights | None, version: int) -> Future[Published]:
        """Write a version at once: an adapter is small."""
        done: Future[Published] = Future()
        done.set_result(self.publish(weights, lambda: version))
        return done

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        if self._adapters is not None:
            self._adapters.close()
            self._adapters = None


def _check(model: nn.Module, expected: Kinds | None) -> None:
    check_adapter(model)
    if expected is not None:
        check_shapes(model, expected)
