"""A Ctrl-C, once a condition holds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.waiting import in_thread, until

Interrupt = Callable[[Callable[[], Any]], None]


@contextmanager
def interrupts(heard: Callable[[], None] = lambda: None) -> Iterator[Interrupt]:
    """Raises a ``KeyboardInterrupt`` in this thread once a condition holds, also where a shell ignores Ctrl-C.

    The signal is sent until it is heard: one that comes as a thread is about to wait for a lock may not wake it.
    """
    asked = threading.Event()

    def handle(*_: object) -> None:
        if asked.is_set():
            asked.clear()
            heard()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    senders: list[Any] = []
    main = threading.main_thread().ident
    assert main is not None

    def send(condition: Callable[[], Any]) -> None:
        until(condition)
        asked.set()
        until(lambda: not asked.is_set() or signal.pthread_kill(main, signal.SIGINT))

    def once(condition: Callable[[], Any]) -> None:
        senders.append(in_thread(lambda: send(condition)))

    yield once
    for sender in senders:
        sender.result(60)
    signal.signal(signal.SIGINT, before)
