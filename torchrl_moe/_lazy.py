"""Names that a room exports but loads on first use (PEP 562); a missing package is an ImportError there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

__all__ = ["attach", "without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause garbage collection within the context, unless it is off already.

    Imports make up to a million objects, which stay; to look for garbage among them took a quarter of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def attach(
    package_name: str, files: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a room that exports lazily: of each file, some names.

    Type checkers do not see this: a room also imports the same names under ``TYPE_CHECKING``.

    >>> load, _, names = attach("torchrl_moe", {".errors": "TorchRLMoEError EngineError"})
    >>> names
    ['EngineError', 'TorchRLMoEError']
    >>> load("TorchRLMoEError")
    <class 'torchrl_moe.errors.TorchRLMoEError'>
    """
    exports = {name: module for module, names in files.items() for name in names.split()}

    # importing the file would replace the exported name in the room by the module
    if clashes := [name for name, module in exports.items() if module == f".{name}"]:
        raise ValueError(f"{package_name} exports {', '.join(clashes)} of a file of the same name: rename the file")

    def __getattr__(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package_name!r} has no attribute {name!r}")
        if not exports[name]:
            return _import(f".{name}", package_name)  # which sets the attribute
        try:
            value = getattr(_import(exports[name], package_name), name)
        except AttributeError as error:
            # Left as it is, `from room import name` would swallow the cause, and hasattr(room, name) would say False.
            raise ImportError(f"cannot load {name!r} of {package_name!r} from {exports[name]!r}: {error}") from error
        # the next access finds it in the module and does not come here
        setattr(sys.modules[package_name], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package_name]), *exports})

    # ruff's order: constants, classes, the rest
    names = sorted(exports, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
    return __getattr__, __dir__, names


def _import(name: str, package_name: str) -> Any:
    with without_collections():
        return import_module(name, package_name)
