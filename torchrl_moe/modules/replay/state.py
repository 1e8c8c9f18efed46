"""Which binding is active on a model, and in which thread: contexts, and the runs of checkpointed layers.

A router asks here which routes to follow. Two places may hold them, and a checkpointed layer goes before the context,
because its second run comes when the context is closed, or belongs to another micro-batch:

.. code-block:: text

                                        open context     checkpointed layer     a router follows
    with replay.replay(A):
        a layer without checkpointing   A                -                      A
        a checkpointed layer            A                A, captured            A
    with replay.replay(B):              B                -                      B
    loss_of_A.backward(), second run    -, or B          A, restored            A
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchrl_moe._errors import ReplayError
from torchrl_moe.modules.replay.binding import Binding

__all__ = ["ReplayState"]

_TWO_THREADS = "another thread has a context of this model open: one thread at a time"


@dataclass(frozen=True, slots=True)
class _Held:
    """An active binding; ``recompute``: in a checkpointed layer's second run."""

    binding: Binding | None = None
    recompute: bool = False


class _Layer(threading.local):
    """The binding of the checkpointed layer that runs in this thread; ``None`` outside of one.

    Per thread: autograd runs the backward of each device in its own thread.
    """

    def __init__(self) -> None:
        self.held: _Held | None = None  # set in every thread, so that a compiled graph can look at it


class ReplayState:
    """The state that the handles of one model look up while they run: the active binding, and its thread.

    Plain attributes rather than a context variable, so that a compiled graph can read them. A copy, or an unpickled
    state, starts without a binding and without an owner: the original's contexts do not reach a copied model.
    """

    def __init__(self, owner: object | None = None) -> None:
        self.owner = owner
        self.used = False
        """Whether a context was opened, whose forward pass may have a backward still to come."""
        self._open = _Held()
        self._thread: int | None = None
        self._layer = _Layer()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayState, ()

    @property
    def owned(self) -> bool:
        """Whether a ``RouterReplay`` owns the handles."""
        return self.owner is not None

    @property
    def is_open(self) -> bool:
        """Whether a context is open."""
        return self._open.binding is not None

    @property
    def recompute(self) -> bool:
        """Whether this thread is in a checkpointed layer's second run."""
        return self._layer.held is not None and self._layer.held.recompute

    @property
    def binding(self) -> Binding | None:
        """The active binding.

        Raises:
            ReplayError: it is another thread's, or this is a recompute that :meth:`recomputing` does not hold.
        """
        held = self._open if self._layer.held is None else self._layer.held
        if torch.compiler.is_compiling():
            return held.binding
        if self.used and not held.recompute and torch._C._current_graph_task_id() != -1:
            raise ReplayError(
                "a router runs inside backward(), in a recompute whose routes are not known: checkpoint the layers "
                "with model.gradient_checkpointing_enable(), which is activation_checkpointing_enable() from "
                "transformers 5.23 on, or torch's checkpoint_wrapper, and not with a torch.utils.checkpoint call of "
                "your own"
            )
        if held is self._open and held.binding is not None and self._thread != threading.get_ident():
            raise ReplayError(_TWO_THREADS)
        return held.binding

    @contextmanager
    def opened(self, binding: Binding) -> Iterator[None]:
        """Make ``binding`` the active one.

        Raises:
            ReplayError: there is one already, or this model's handles were removed.
        """
        with self._lock:
            if not self.owned:
                raise ReplayError("this RouterReplay was removed from its model: make a new one")
            if self.is_open and self._thread != threading.get_ident():
                raise ReplayError(_TWO_THREADS)
            if self.is_open or self._layer.held is not None:
                raise ReplayError("a context of this model is open already: close it first, they do not nest")
            # without gradients, too: they may be enabled inside
            self.used = True
            self._open, self._thread = _Held(binding), threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._open, self._thread = _Held(), None

    @contextmanager
    def recomputing(self, binding: Binding | None, again: bool) -> Iterator[None]:
        """Run a checkpointed layer in this thread with the binding of its forward pass, then restore the previous one.

        Args:
            binding: the one captured; ``None``: the layer ran natively.
            again: whether this is its second run or a later one.
        """
        before, self._layer.held = self._layer.held, _Held(binding, again)
        try:
            yield
        finally:
            self._layer.held = before
