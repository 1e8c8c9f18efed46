"""A Ctrl-C, once a condition holds."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from support.waiting import in_thread, until

Interrupt = Callable[[Callable[[], Any]], None]
DROPS = ("__del__", "gc_callback", "weakref.py", "_weakrefset.py")
"""Functions, and files of functions, that Python calls by itself; ``gc_callback`` is hypothesis'."""


@contextmanager
def interrupts(heard: Callable[[], None] = lambda: None) -> Iterator[Interrupt]:
    """Raises a ``KeyboardInterrupt`` in this thread once a condition holds, also where a shell ignores Ctrl-C.

    The signal is sent until it is heard: one that comes as a thread is about to wait for a lock may not wake it, and
    Python drops what is raised in a ``__del__``, or in a callback of a weak reference or the garbage collector.
    """
    asked = threading.Event()

    def handle(_: int, frame: FrameType | None) -> None:
        codes = [one.f_code for one, _ in traceback.walk_stack(frame)]
        is_dropped = any(code.co_name in DROPS or code.co_filename.endswith(DROPS) for code in codes)
        if asked.is_set() and not is_dropped:
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
