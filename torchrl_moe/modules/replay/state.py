"""Which binding is in force on a model, and for which thread: contexts, and the second runs of checkpointed layers."""

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

_TWO_THREADS = "another thread has a context of this model open, or runs its backward: one thread at a time"


@dataclass(frozen=True, slots=True)
class _Held:
    """The binding in force, and the thread it is for; ``recompute``: in a checkpointed layer's second run."""

    binding: Binding | None = None
    recompute: bool = False
    thread: int | None = None


class ReplayState:
    """What the handles of one model look up while they run: the active binding, and whose it is.

    Plain attributes rather than a context variable, so that a compiled graph can read them. A copy, or what comes out
    of a pickle, starts without a binding and without an owner: the original's contexts do not reach a copied model.
    """

    def __init__(self, owned: bool = False) -> None:
        self.owned = owned
        self._held = _Held()
        self._trains = False  # a context with gradients was opened
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayState, ()

    @property
    def is_open(self) -> bool:
        """Whether a context is open."""
        return self._held.binding is not None

    @property
    def recompute(self) -> bool:
        """Whether a checkpointed layer is in its second run."""
        return self._held.recompute

    @property
    def binding(self) -> Binding | None:
        """The active binding.

        Raises:
            ReplayError: it is another thread's, or this is a recompute that nobody told us of.
        """
        held = self._held
        if torch.compiler.is_compiling():
            return held.binding
        if self._trains and not held.recompute and torch._C._current_graph_task_id() != -1:
            raise ReplayError(
                "a router runs inside backward(), in a recompute whose routes are not known: checkpoint the layers "
                "with model.gradient_checkpointing_enable() or torch's checkpoint_wrapper, and not with a "
                "torch.utils.checkpoint call of your own"
            )
        if held.binding is not None and held.thread != threading.get_ident():
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
            if self._held.thread not in (None, threading.get_ident()):
                raise ReplayError(_TWO_THREADS)
            if self.is_open:
                raise ReplayError("a context of this model is open already: close it first, they do not nest")
            self._trains |= torch.is_grad_enabled()
            held = _Held(binding, False, threading.get_ident())
            before, self._held = self._held, held
        try:
            yield
        finally:
            self._release(held, before)

    @contextmanager
    def recomputing(self, binding: Binding | None, again: bool) -> Iterator[None]:
        """Run a checkpointed layer with the binding of its forward pass, and put back what was there.

        Args:
            binding: the one captured; ``None``: the layer ran natively.
            again: whether this is its second run or a later one.
        """
        held = _Held(binding, again, threading.get_ident())
        with self._lock:
            before, self._held = self._held, held
        try:
            yield
        finally:
            self._release(held, before)

    def _release(self, held: _Held, before: _Held) -> None:
        """Put ``before`` back. Threads that ran at once would put back each other's: then nothing is left active."""
        with self._lock:
            mine = self._held is held
            self._held = before if mine else _Held()
        if not mine:
            raise ReplayError(_TWO_THREADS)
