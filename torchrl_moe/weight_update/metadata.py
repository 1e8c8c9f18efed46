"""What a trainer's model would send: names, dtypes and shapes, as the engine's checkpoint has them."""

from __future__ import annotations

import torch
from torch import nn

from torchrl_moe.modules.policies.unstack import model_metadata

__all__ = ["get_model_metadata"]


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return checkpoint name -> (dtype, shape) of a transformers model's tensors, experts one by one.

    A wrapper with a ``model`` attribute (``TransformersWrapper``) is looked through.

    >>> from torchrl_moe.testing import make_tiny_moe
    >>> metadata = get_model_metadata(make_tiny_moe("mixtral"))
    >>> metadata["lm_head.weight"]
    (torch.float32, torch.Size([259, 64]))
    """
    return model_metadata(trained_model(model))


def trained_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a wrapper, or the model itself."""
    inner = getattr(model, "model", None)
    return (
        inner if isinstance(inner, nn.Module) and hasattr(inner, "config") and not hasattr(model, "config") else model
    )
