"""Gradients of a model, and whether two are the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_moe._compat_transformers import checkpoint_activations as checkpoint_activations


def loss_of(logits: Tensor) -> Tensor:
    """Any scalar that every logit enters with another weight."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    return (logits * weights.to(logits)).sum() / 64


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of the parameters that have one, taken off the model."""
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return taken


def backward(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and all gradients of one forward and backward pass."""
    logits = model(ids).logits
    loss_of(logits).backward()
    return logits.detach(), gradients(model)


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], atol: float = 0.0) -> None:
    assert got.keys() == wanted.keys()
    assert wanted
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
