"""Properties of a model that several ranks share: the device it computes on, and whether replay supports it.

Sharded parameters are DTensors, whose mesh names the device and, if it was given names, the axes.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

__all__ = ["computing_device", "refused_parallelism", "summed_again"]

REFUSED_AXES = {
    "cp": "context parallelism: a rank sees a part of each sequence, and routes are laid out as the whole",
    "sp": "sequence parallelism: a rank sees a part of each sequence, and routes are laid out as the whole",
    "pp": "pipeline parallelism: a rank has a part of the layers, and runs no whole forward pass",
    "etp": "expert-tensor parallelism: the experts of an expert-parallel rank are cut over ranks once more",
}
"""Names of mesh axes, as torchtitan, accelerate and transformers have them."""


def computing_device(model: nn.Module) -> torch.device:
    """Return the device on which a model runs.

    That of its parameters; of sharded ones, the mesh's: under ``CPUOffloadPolicy`` FSDP2 keeps parameters in host
    memory, and brings them to the device when they are needed.
    """
    first = next(model.parameters())
    kind = getattr(getattr(first, "device_mesh", None), "device_type", first.device.type)
    return first.device if kind == first.device.type else torch.device(kind)


def refused_parallelism(model: nn.Module) -> str:
    """Return the kind of parallelism that replay does not support in a model, and why; empty if there is none."""
    axes = [("pp", getattr(_distributed_config(model), "pp_size", 1))]
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            axes += zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
    return next((REFUSED_AXES[name] for name, size in axes if name in REFUSED_AXES and size > 1), "")


def summed_again(model: nn.Module) -> str:
    """Return the name of a parameter whose gradient the next backward pass would corrupt; empty if there is none.

    Under tensor parallelism transformers sums the gradients of norms over ranks after each backward pass, including
    what earlier passes accumulated (5.23, style ``replicated_with_grad_allreduce``), unless FSDP also shards them.
    """
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, dict) or getattr(_distributed_config(model), "tp_size", 1) == 1:
        return ""
    for name, parameter in model.named_parameters():
        module = re.sub(r"\.\d+\.", ".*.", name.rpartition(".")[0])
        grad = parameter.grad if plan.get(module) == "replicated_with_grad_allreduce" else None
        if grad is not None and not hasattr(parameter, "device_mesh") and bool(grad.any()):
            return name
    return ""


def _distributed_config(model: nn.Module) -> Any:
    return getattr(getattr(model, "config", None), "distributed_config", None)
