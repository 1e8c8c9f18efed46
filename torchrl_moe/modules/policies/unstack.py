"""A trainer's weights under checkpoint names: experts one by one, as vLLM and the hub have them.

transformers keeps the experts of a layer in one stacked tensor; checkpoints have one tensor per expert. The conversion
is transformers' own, run backwards, the same as ``save_pretrained`` uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["checkpoint_tensors", "model_metadata"]


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return checkpoint name -> tensor of every weight and persistent buffer that ``save_pretrained`` would write.

    Tied weights come once. Expert slices are views of the stacked tensors where transformers makes them so; treat all
    as read-only. Buffers count: a router's correction bias is one.

    Raises:
        TypeError: the model has adapters beside its weights.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    bare: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    if hasattr(bare, "get_base_model") or getattr(bare, "_hf_peft_config_loaded", False):
        raise TypeError("a peft model has adapters beside its weights: merge them first, model.merge_and_unload()")
    state = remove_tied_weights_from_state_dict(dict(bare.state_dict()), bare)
    converted: dict[str, Tensor] = revert_weight_conversion(bare, state)
    return converted


def model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return checkpoint name -> (dtype, shape) of what :func:`checkpoint_tensors` gives."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint_tensors(model).items()}
