"""Calls to an engine that may never answer, in threads that are not joined at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torchrl_moe.testing.conformance.report import DoesNotHold

__all__ = ["in_thread", "result"]

Result = TypeVar("Result")


def in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Run a function in its own thread; return a future of its result."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="torchrl_moe-conformance", daemon=True).start()
    return future


def result(future: Future[Result], seconds: float) -> Result:
    """Wait for a future."""
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if future.done():  # the engine's own timeout
            raise
        raise DoesNotHold(f"the engine did not answer within {seconds:g} s") from error
