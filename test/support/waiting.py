"""Waiting for what threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

HOUR = 3600.0  # seconds that no test waits for
PATIENCE = 60.0  # after which what a test waits for will not come: the machine may be busy with other things


def until(condition: Callable[[], Any], seconds: float = PATIENCE, look_every: float = 0.01) -> Any:
    """Wait for a condition to hold; return its value, or fail."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(look_every)
    return value


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """A future of what a function does in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future
