"""Replacing a folder by another, complete one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["exchange", "recover"]


def exchange(draft: Path, folder: Path, replaces: Callable[[str], bool] = lambda _: True) -> None:
    """Put a folder in the place of an older one, which is restored if that fails.

    Args:
        draft: the new one.
        folder: its place.
        replaces: whether an older entry of a name goes, if the new folder has none; others are moved into it.
    """
    older = folder.with_name(f".{folder.name}.older")
    recover(older)
    _clear(older, folder, replaces)
    if folder.exists():
        os.replace(folder, older)  # a folder that is not empty cannot be replaced
    try:
        os.replace(draft, folder)
    except BaseException:
        if older.exists():
            os.replace(older, folder)
        raise
    _clear(older, folder, replaces)


def _clear(older: Path, folder: Path, replaces: Callable[[str], bool]) -> None:
    for entry in older.iterdir() if older.exists() else ():
        if not replaces(entry.name) and not os.path.lexists(folder / entry.name):
            os.replace(entry, folder / entry.name)
    shutil.rmtree(older, ignore_errors=True)


def recover(older: Path) -> None:
    """Put back a folder that a kill caught between its two renamings, when it was the only copy."""
    folder = older.with_name(older.name.removeprefix(".").removesuffix(".older"))
    if older.exists() and not folder.exists():
        os.replace(older, folder)
