"""A function that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises this error, whatever it is given."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail
