"""Functions by name, ``"package.module:function"``, as a configuration file gives them.

It loads nothing: a command looks them up before torch is there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from types import ModuleType
from typing import Any

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_function_name(text: str) -> bool:
    """Whether a text has the form of a function's name; the function need not exist.

    >>> is_function_name("my_task.rewards:exact"), is_function_name("openai/gsm8k")
    (True, False)
    """
    return NAME.fullmatch(text) is not None


def look_in(folder: str | os.PathLike[str]) -> None:
    """Look for users' modules in a folder first, from now on, as Python does in the folder of a script."""
    path = os.path.abspath(folder)
    if path not in map(os.path.abspath, sys.path):
        sys.path.insert(0, path)


def import_users_module(module: str) -> ModuleType:
    """Import a module that a user names: the current folder is looked in first, see :func:`look_in`."""
    look_in(os.curdir)
    invalidate_caches()  # it may have been written a moment ago
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise ValueError(f"cannot import {module!r}: {error}") from error
        # of the search path, the folders that are the user's own
        folders = (os.path.abspath(one) for one in sys.path)
        own = [one for one in folders if os.path.isdir(one) and not one.startswith((sys.prefix, sys.base_prefix))]
        raise ValueError(
            f"cannot import {module!r}: there is no {error.name}.py, and no package {error.name}, in {', '.join(own)}, "
            "nor is one installed. Start in its folder, put it beside the YAML file, or add its folder to PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ValueError(f"cannot import {module!r}: {type(error).__name__}: {error}") from error


def import_function(name: str) -> Callable[..., Any]:
    """Return a function by its name.

    >>> import_function("math:sqrt")(4)
    2.0
    """
    if not is_function_name(name):
        raise ValueError(f"{name!r} is not the name of a function: write it as 'package.module:function'")
    module_name, _, path = name.partition(":")
    found: object = import_users_module(module_name)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ValueError(f"there is no {name!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is not a function, but of type {type(found).__name__}")
    return found
