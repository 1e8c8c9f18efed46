"""Hands a batch from the collector's loop to the trainer: exactly one of them owns it, whatever interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from tensordict import TensorDictBase

__all__ = ["Delivery"]

T = TypeVar("T")


class Delivery:
    """Hands each batch over once. Until a batch is accepted, the collector owns it.

    Args:
        wait: returns a future's result, or raises if nothing will fulfil it any more.
    """

    def __init__(self, wait: Callable[[Future[TensorDictBase]], TensorDictBase] = Future.result) -> None:
        self._wait = wait
        self._awaited: Future[TensorDictBase] | None = None
        self._turn = threading.Lock()  # threads that wait for batches do so one after the other
        self._still = threading.RLock()  # held while a batch changes its owner

    def take(
        self,
        ask: Callable[[Future[TensorDictBase]], object],
        accept: Callable[[TensorDictBase], T],
        waiting: AbstractContextManager[object],
    ) -> T:
        """Wait for the next batch; after a Ctrl-C, or an error in ``accept``, the next call takes the same batch.

        Args:
            ask: called with a future, which it fulfils with the next batch, ``[rows]``; a second call with it has no
                effect.
            accept: gets the batch; once it returns, the batch is the trainer's.
            waiting: a context manager that is entered while there is no batch.

        Returns:
            What ``accept`` returns.

        Raises:
            Exception: what the future ended with, or what ``ask`` or ``accept`` raises.
        """
        with self._turn:
            with self._still:
                if self._awaited is None:
                    self._awaited = Future()
                ask(self._awaited)
            try:
                with waiting:
                    batch = self._wait(self._awaited)
            except Exception:
                self._awaited = None
                raise
            with self._still:
                accepted = accept(batch)
                self._awaited = None
            return accepted

    @contextmanager
    def still(self) -> Iterator[Future[TensorDictBase] | None]:
        """Hand nothing over within the context; yields the future of a batch that the trainer does not own yet."""
        with self._still:
            yield self._awaited
