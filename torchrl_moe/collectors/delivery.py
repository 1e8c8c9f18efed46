"""The way of a batch from the collector's loop to the trainer: it has exactly one of them, whatever interrupts it."""

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
    """Hands batches over, each once. Until one is accepted, it is the collector's."""

    def __init__(self) -> None:
        self._awaited: Future[TensorDictBase] | None = None
        self._turn = threading.Lock()  # threads that wait for batches do so one after the other
        self._still = threading.RLock()  # while a batch is neither here nor there

    def take(
        self,
        ask: Callable[[Future[TensorDictBase]], object],
        accept: Callable[[TensorDictBase], T],
        waiting: AbstractContextManager[object],
    ) -> T:
        """Wait for the next batch; after a Ctrl-C, or an error of ``accept``, the next call takes the same one.

        Args:
            ask: has a future fulfilled with the next batch, ``[rows]``, unless it was called with that before.
            accept: gets the batch; once it returns, the batch is the trainer's.
            waiting: is entered while there is no batch.

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
                    batch = self._awaited.result()
            except Exception:
                self._awaited = None
                raise
            with self._still:
                accepted = accept(batch)
                self._awaited = None
            return accepted

    @contextmanager
    def still(self) -> Iterator[Future[TensorDictBase] | None]:
        """Hand nothing over within the context; yields the future of a batch that is not the trainer's yet."""
        with self._still:
            yield self._awaited
