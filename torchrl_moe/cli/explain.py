"""Errors as one line that says what to do."""

from __future__ import annotations

import errno
import os
import re
import tempfile

from torchrl_moe._errors import RequestRefusedError, TorchRLMoEError, UnsupportedRouterError
from torchrl_moe.cli.command import BAD_USE, PROBLEM, BadUse

__all__ = ["EXTRAS", "STDOUT", "explain", "missing_extra"]

EXTRAS = {
    "hydra": "train",
    "omegaconf": "train",
    "peft": "train",
    "tensorboard": "train",
    "yaml": "train",
    "matplotlib": "render",
    "pandas": "render",
    "rich": "render",
    "prometheus_client": "prometheus",
    "ray": "ray",
    "vllm": "vllm",
}
"""Module -> the extra of this package that installs it."""
STDOUT = "standard output"
"""The name of the stream of results, as an error's ``filename``."""
FULL = {errno.ENOSPC, errno.EDQUOT}
CAUSE = re.compile(r"\b\w+(Error|Exception): .+")
VAGUE = "See root cause above"
"""vLLM's message for an error in one of its processes, which only the log names."""
WHERE = "--traceback shows where it comes from"


def explain(error: Exception) -> tuple[str, int]:
    """Return an error as one line that says what to do, and the exit code.

    >>> explain(ModuleNotFoundError("No module named 'ray'", name="ray"))
    ("needs ray, which is not installed: pip install 'torchrl_moe[ray]'", 2)
    """
    root = _root(error)
    if isinstance(root, ModuleNotFoundError):
        if _top(root.name) in EXTRAS:
            return missing_extra(_top(root.name)), BAD_USE
        if root is error:  # what else installs, only its name says, and that may be the user's own
            return f"{_first_line(root)} ({WHERE})", BAD_USE
    if isinstance(root, OSError) and root.filename == STDOUT:
        return f"{STDOUT} cannot be written to ({root.strerror}): redirect it to a place with room", PROBLEM
    if isinstance(root, OSError) and root.errno in FULL:
        return _disk_full(root), PROBLEM
    if isinstance(root, OSError) and root.errno == errno.EADDRINUSE:
        return f"{_first_line(root)}: free the port, or use another", BAD_USE
    if isinstance(error, PermissionError):
        return f"{_first_line(error)}: use a folder that you may read and write", BAD_USE
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({_first_line(error)}): use a narrower dtype, or a smaller model", PROBLEM
    if isinstance(error, BadUse | RequestRefusedError | UnsupportedRouterError | ValueError | ImportError):
        return _first_line(error), BAD_USE
    if isinstance(error, TorchRLMoEError):
        return _of_engine(error), PROBLEM
    return f"{type(error).__name__}: {_first_line(error)} ({WHERE})", PROBLEM


def missing_extra(module: str) -> str:
    """Return what to do about a module of ``EXTRAS`` that is not installed."""
    return f"needs {module}, which is not installed: pip install 'torchrl_moe[{EXTRAS[module]}]'"


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _of_engine(error: TorchRLMoEError) -> str:
    """Return the first line of an error, with the line of the engine's log that says why, if there is one."""
    first, *log = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if not log:
        return first
    causes = [found[0] for line in log if (found := CAUSE.search(line)) and VAGUE not in line]
    why = f" It was {causes[-1]}" if VAGUE in first and causes else ""
    return f"{first}{why} (--traceback shows the rest, with the engine's log)"


def _root(error: BaseException) -> BaseException:
    """Return an error's root cause if that says more: a missing module, or an error of the operating system."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) or (isinstance(cause, OSError) and cause.errno is not None):
            return cause
        cause = cause.__cause__
    return error


def _disk_full(error: OSError) -> str:
    where = error.filename or f"{os.getcwd()} or {tempfile.gettempdir()}"
    return f"the disk is full at {where}: make room there; TMPDIR names another place for temporary files"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
