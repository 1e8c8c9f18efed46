"""Processes of their own for what ends a process; forked, since importing torch anew takes seconds."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from collections.abc import Callable


def exit_code_of(work: Callable[[], object]) -> int | None:
    """Run a function in a child; return its exit status, negative for a signal."""

    def run() -> None:
        faulthandler.disable()  # a death is expected here
        work()
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(60.0)
    return child.exitcode
