"""Signals that end a run: the running step may finish and be saved first."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["finishing"]

LOG = logging.getLogger(__name__)

USUAL: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Ctrl-C, what batch schedulers send, and the end of a terminal (without nohup) -> what Python does then."""


@contextmanager
def finishing(ask: Callable[[], None], end: Callable[[], object], seconds: float) -> Iterator[None]:
    """Let what runs in the context finish when the process is told to end; then the signal has its usual effect.

    A second signal, or the deadline, ends it at once. Handlers of the user's own stay, and so does everything outside
    the main thread, where Python hears no signals.

    Args:
        ask: called at the first signal: asks to finish soon.
        end: called in the end, before a signal that ends the process without any clean-up has its effect.
        seconds: that finishing may take; 0: signals end it at once.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number, usual in USUAL.items() if is_main and seconds and signal.getsignal(number) is usual]
    heard: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if heard:
            give_back()
            signal.raise_signal(number)
            return
        heard.append(number)
        timer.start()
        LOG.warning(
            "%s: the running step is finished and saved, in at most %g s; a second signal ends the run at once",
            signal.Signals(number).name,
            seconds,
        )
        ask()

    def give_back() -> None:
        for number in ours:
            signal.signal(number, USUAL[number])

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), lambda: os.kill(os.getpid(), heard[0]))
    timer.daemon = True
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        timer.cancel()
        give_back()
    if heard:
        if heard[0] != signal.SIGINT:  # a KeyboardInterrupt leaves clean-up to the contexts that it passes
            end()
        signal.raise_signal(heard[0])
