"""Keeping a binding for a checkpointed layer's second run, which happens in ``backward``.

By then the context may be closed, or belong to another micro-batch. So the binding is captured in the layer's forward,
and restored only for its recompute::

    with replay.replay(A): forward          layer captures A
    with replay.replay(B): forward          layer captures B
    loss_A.backward()                       recompute under A, although B was last
    loss_B.backward()                       recompute under B

transformers runs a checkpointed layer through one of the attributes ``NAMES``, torch's ``checkpoint_wrapper`` through
the other. Enabling checkpointing overwrites it, so it is wrapped again whenever a context opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from torchrl_moe._errors import ReplayError
from torchrl_moe.modules.replay.state import ReplayState

__all__ = ["release_checkpoints", "wrap_checkpoints"]

NAMES = ("_gradient_checkpointing_func", "checkpoint_fn")


class _Captured:
    """A checkpointed layer's function; its first call is the forward, every later one a recompute."""

    def __init__(self, state: ReplayState, function: Any) -> None:
        self._state = state
        self._binding = state.binding
        self._function = function
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        recompute = self._calls > 1
        if recompute and self._binding is not None and not self._state.owned:
            raise ReplayError("remove() came before the backward of a checkpointed forward pass: call it after")
        with self._state.recomputing(self._binding, recompute):
            return self._function(*args, **kwargs)


class _Checkpoint:
    """Stands in for a layer's checkpoint function."""

    def __init__(self, state: ReplayState, checkpoint: Any) -> None:
        self.state = state
        self.checkpoint = checkpoint

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(_Captured(self.state, function), *args, **kwargs)


def _checkpoints(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name in NAMES:
            checkpoint = module.__dict__.get(name)
            if checkpoint is not None:
                yield module, name, checkpoint


def wrap_checkpoints(model: nn.Module, state: ReplayState) -> None:
    """Wrap the checkpoint function of every layer that has one and is not wrapped yet."""
    for module, name, checkpoint in _checkpoints(model):
        if not isinstance(checkpoint, _Checkpoint):
            setattr(module, name, _Checkpoint(state, checkpoint))


def release_checkpoints(model: nn.Module) -> None:
    """Put the layers' own functions back."""
    for module, name, checkpoint in _checkpoints(model):
        if isinstance(checkpoint, _Checkpoint):
            setattr(module, name, checkpoint.checkpoint)
