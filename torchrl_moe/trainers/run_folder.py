"""A run's folder: replaced whole by another, and locked by the process that writes it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torchrl_moe.trainers.config import ConfigError

__all__ = ["RunLock", "exchange", "recover"]


def exchange(draft: Path, folder: Path, replaces: Callable[[str], bool] = lambda _: True) -> None:
    """Put a complete folder in the place of an older one, which is restored if that fails."""
    # what an earlier kill left first; then two renamings, with the older folder hidden between them
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
    # entries that the new folder does not replace move into it: a user's files beside a model stay
    for entry in older.iterdir() if older.exists() else ():
        if not replaces(entry.name) and not os.path.lexists(folder / entry.name):
            os.replace(entry, folder / entry.name)
    shutil.rmtree(older, ignore_errors=True)


def recover(older: Path) -> None:
    """Put back a folder that a kill caught between its two renamings, when it was the only copy."""
    folder = older.with_name(older.name.removeprefix(".").removesuffix(".older"))
    if older.exists() and not folder.exists():
        os.replace(older, folder)


class RunLock:
    """Keeps a second run out of a folder, until it is closed or its process ends.

    A file system without locks (some NFS mounts) keeps nobody out.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"out={folder} cannot be written to: {error.strerror}") from error
        if not os.access(folder, os.W_OK):
            self.close()
            raise ConfigError(f"out={folder} cannot be written to: it is read-only")
        # a lock of the folder itself, so that nothing is written into it before the first step
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"out={folder} is used by another run: name another folder, or end that run") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise

    def close(self) -> None:
        """Let the next run in. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)
