"""Functions by name, ``"package.module:function"``, as a configuration file gives them."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["import_function", "is_function_name"]

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_function_name(text: str) -> bool:
    """Whether a text has the form of a function's name; the function need not exist.

    >>> is_function_name("my_task.rewards:exact"), is_function_name("openai/gsm8k")
    (True, False)
    """
    return NAME.fullmatch(text) is not None


def import_function(name: str) -> Callable[..., Any]:
    """Return a function by its name.

    Args:
        name: ``"package.module:function"``; ``"package.module:Class.method"`` works too.

    Raises:
        ValueError: the name has another form, the module does not exist or cannot be imported, or it has no such
            function.

    >>> import_function("math:sqrt")(4)
    2.0
    """
    if not is_function_name(name):
        raise ValueError(f"{name!r} is not the name of a function: write it as 'package.module:function'")
    module_name, _, path = name.partition(":")
    try:
        found: Any = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"cannot import {module_name!r} of {name!r}: {error}") from error
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ValueError(f"there is no {name!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is not a function but a {type(found).__name__}")
    return found
