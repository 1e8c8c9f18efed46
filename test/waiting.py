"""Waiting for what threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 5.0, look_every: float = 0.01) -> Any:
    """Wait for a condition to hold; return its value, or fail."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(look_every)
    return value
