"""Replacing a folder by another, complete one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["exchange", "recover"]


def exchange(draft: Path, folder: Path) -> None:
    """Put a folder in the place of an older one, which is restored if that fails."""
    older = folder.with_name(f".{folder.name}.older")
    recover(older)
    shutil.rmtree(older, ignore_errors=True)
    if folder.exists():
        os.replace(folder, older)  # a folder that is not empty cannot be replaced
    try:
        os.replace(draft, folder)
    except BaseException:
        if older.exists():
            os.replace(older, folder)
        raise
    shutil.rmtree(older, ignore_errors=True)


def recover(older: Path) -> None:
    """Put back a folder that a kill caught between its two renamings, when it was the only copy."""
    folder = older.with_name(older.name.removeprefix(".").removesuffix(".older"))
    if older.exists() and not folder.exists():
        os.replace(older, folder)
