"""The tensors that a trainer's model sends: names, dtypes and shapes, as in the engine's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchrl_moe._errors import ManifestMismatch
from torchrl_moe.modules.policies.unstack import ModelWeights, model_metadata
from torchrl_moe.weight_update.store import check_tensors

__all__ = ["check_metadata", "get_model_metadata", "trained_model"]


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return checkpoint name -> (dtype, shape) of a transformers model's tensors, experts one by one.

    A wrapper with a ``model`` attribute (``TransformersWrapper``) is unwrapped.

    >>> from torchrl_moe.testing import make_tiny_moe
    >>> metadata = get_model_metadata(make_tiny_moe("mixtral"))
    >>> metadata["lm_head.weight"]
    (torch.float32, torch.Size([259, 64]))
    """
    return model_metadata(trained_model(model))


def trained_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a wrapper or torch's data parallelism, or the model itself."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    inner = getattr(model, "model", None)
    return (
        inner if isinstance(inner, nn.Module) and hasattr(inner, "config") and not hasattr(model, "config") else model
    )


def check_metadata(
    metadata: Mapping[str, Any] | None, expected: Mapping[str, Any], model: ModelWeights | None = None
) -> None:
    """Compare a user's metadata with the engine's tensors.

    Args:
        metadata: name -> (dtype, shape): of checkpoint tensors, or of a model's own, stacked ones; ``None``: not
            checked.
        expected: the engine's, by checkpoint name.
        model: the model that is sent, if known; it has the stacked names.

    Raises:
        ManifestMismatch: the metadata names other tensors, or checkpoint tensors of another dtype or shape.
    """
    if metadata is None:
        return
    if set(metadata) == set(expected):
        check_tensors(metadata, expected)
    elif model is not None:
        if not model.keys <= set(metadata):
            raise ManifestMismatch(
                "metadata names neither the engine's checkpoint tensors nor the model's own: pass None, "
                "get_model_metadata(model) or engine.get_model_metadata()"
            )
    elif not any("experts" in name and name not in expected for name in metadata):
        raise ManifestMismatch(
            "metadata does not name the engine's checkpoint tensors: pass None, get_model_metadata(model) or "
            "engine.get_model_metadata(); a model's own stacked names need register_model(model) first"
        )
