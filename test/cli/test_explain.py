"""Errors become one line with what to do, and an exit code."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from torchrl_moe.cli.command import BadUse
from torchrl_moe.cli.models import explain
from torchrl_moe.errors import ReplicaDiedError, RequestRefusedError, UnsupportedRouterError


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "No space left on device", "/data/run/model.safetensors")
BUSY = OSError(errno.EADDRINUSE, "Address already in use")


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (BadUse("name a model"), "name a model", 2),
        (ValueError("x must be positive\nmore"), "x must be positive", 2),
        (UnsupportedRouterError("no router"), "no router", 2),
        (RequestRefusedError("too long"), "too long", 2),
        (ReplicaDiedError("it died"), "it died", 1),
        (
            ReplicaDiedError("it died\nits log"),
            "it died (--traceback shows the rest, with the engine's log)",
            1,
        ),
        (
            ReplicaDiedError(
                "it did not start: RuntimeError: See root cause above.\n(core) ValueError: no room for the cache\n"
                "(core) more\nRuntimeError: See root cause above."
            ),
            "it did not start: RuntimeError: See root cause above. It was ValueError: no room for the cache "
            "(--traceback shows the rest, with the engine's log)",
            1,
        ),
        (
            ModuleNotFoundError("No module named 'hydra.core'", name="hydra.core"),
            "needs hydra, which is not installed: pip install 'torchrl_moe[train]'",
            2,
        ),
        (
            raised_from(ImportError("cannot load it"), ModuleNotFoundError("no rich", name="rich")),
            "needs rich, which is not installed: pip install 'torchrl_moe[render]'",
            2,
        ),
        (
            FULL,
            "the disk is full at /data/run/model.safetensors: make room there; TMPDIR names another place for "
            "temporary files",
            1,
        ),
        (raised_from(ValueError("cannot save"), FULL), explain(FULL)[0], 1),
        (
            OSError(errno.ENOSPC, "No space left on device", "standard output"),
            "standard output cannot be written to (No space left on device): redirect it to a place with room",
            1,
        ),
        (
            OSError(errno.EIO, "Input/output error", "standard output"),
            "standard output cannot be written to (Input/output error): redirect it to a place with room",
            1,
        ),
        (BUSY, "[Errno 98] Address already in use: free the port, or use another", 2),
        (
            PermissionError(errno.EACCES, "Permission denied", "/root/x"),
            "[Errno 13] Permission denied: '/root/x': use a folder that you may read and write",
            2,
        ),
        (MemoryError(), "out of memory (MemoryError): use a narrower dtype, or a smaller model", 1),
        (
            raised_from(ValueError("cannot import 'mine'"), ModuleNotFoundError("No module named 'mine'", name="mine")),
            "cannot import 'mine'",
            2,
        ),
        (
            ModuleNotFoundError("No module named 'torchvision'", name="torchvision"),
            "No module named 'torchvision' (--traceback shows where it comes from)",
            2,
        ),
        (KeyError("a"), "KeyError: 'a' (--traceback shows where it comes from)", 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_is_one_line(error: Exception, line: str, code: int) -> None:
    assert explain(error) == (line, code)


def test_a_full_disk_without_a_name_names_both_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    line, _ = explain(OSError(errno.ENOSPC, "No space left on device"))
    assert str(tmp_path) in line and "TMPDIR" in line
